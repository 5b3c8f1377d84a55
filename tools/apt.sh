# shellcheck shell=bash
# Shared by the scripts of this folder (`source` it): say things, run as root, get missing packages.

say() { printf '%s: %s\n' "${program:?}" "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

# Runs a command as root: directly, or through sudo where there is one.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo -- "$@"
    else
        fail "'$1' has to run as root, and there is no sudo: run this script as root"
    fi
}

# Runs a command in silence; when it fails, shows the end of what it wrote.
quietly() {
    local output
    output=$("$@" 2>&1) || {
        tail -n 25 <<<"$output" >&2
        fail "failed: $*"
    }
}

# Installs those of the named Debian packages that are absent, and touches nothing else.
ensure_packages() {
    local package missing=()
    for package in "$@"; do
        dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null |
            grep -qx installed || missing+=("$package")
    done
    [ "${#missing[@]}" -gt 0 ] || return 0
    say "installing ${missing[*]}"
    # A bare container has no package lists, and old lists name files that mirrors have dropped.
    quietly as_root apt-get -q update
    quietly as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -y --no-install-recommends install "${missing[@]}"
}
