#!/bin/bash
# Installs CRIU in a folder of its own, with its libraries and its dynamic loader, so that nothing
# of the system is replaced. No stable Debian release has a CRIU that can dump on today's kernels:
# 4.1 fails on every TCP socket (SO_PASSCRED), 3.17 on the vdso. So the packages come from testing.
#
# The installed program is only accepted after it has dumped and restored a real process.

set -euo pipefail

program=install_criu
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=tools/apt.sh
source "$here/apt.sh"

usage() {
    cat <<END
Usage: install_criu.sh [--from-packages | --from-source] [DEST]

Installs CRIU >= $version_min into DEST (default: $here/criu); the program is DEST/criu.
Does nothing when a working one is there. Tries Debian's packages, then a build from source;
each option allows one of the two only. SNAPSTORE_CRIU_SUITE names the Debian suite to take
them from (default: $suite); of several, "sid experimental", the last one is preferred.
END
}

version_min=4.2
# A code name, not "testing": it goes on meaning these packages after the next release.
suite=${SNAPSTORE_CRIU_SUITE:-forky}
# What lets CRIU dump other users' processes without CAP_SYS_RESOURCE.
limits_library=limits.so
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
multiarch=$(uname -m)-linux-gnu
# Build dependencies; NO_GNUTLS below spares the rest.
source_packages=(
    gcc libaio-dev libbsd-dev libc6-dev libcap-dev libnet1-dev libnl-3-dev libprotobuf-c-dev
    libprotobuf-dev make pkg-config protobuf-c-compiler protobuf-compiler python3 uuid-dev xz-utils
)

version_of() { "$1/criu" --version 2>/dev/null | sed -n 's/^Version: //p'; }

# True when DEST holds a CRIU that is new enough and starts.
is_new_enough() {
    local version
    version=$(version_of "$1") || return 1
    [ -n "$version" ] && [ "$(printf '%s\n' "$version_min" "$version" | sort -V | head -n 1)" = "$version_min" ]
}

# The same, with everything of this script around it.
is_installed() { [ -e "$1/lib/$limits_library" ] && is_new_enough "$1"; }

# -- where packages come from ---------------------------------------------------------------------

# Prints the Debian mirrors that this machine itself uses, one a line. apt answers, so that both
# formats of its source lists, and whatever is configured in them, count.
machine_mirrors() {
    local codename
    # shellcheck source=/dev/null
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    # shellcheck disable=SC2016 # apt fills in these
    apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE)' \
        'Created-By: Packages' 'Component: main' |
        awk -v codename="$codename" \
            '$2 == codename || $2 ~ /^(oldstable|stable|testing|unstable|sid)$/ { print $1 }' |
        awk '!seen[$0]++'
}

# apt-get with lists, cache and dpkg status of its own: an empty status makes it resolve the whole
# closure, libc included, and leaves the system's state alone. Signatures are checked as ever.
private_apt() {
    apt-get -q -y \
        -o Dir::Etc::SourceList="$work/sources.list" \
        -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State="$work/state" \
        -o Dir::State::Lists="$work/lists" \
        -o Dir::State::status="$work/status" \
        -o Dir::Cache="$work/cache" \
        -o Dir::Log="$work/log" \
        -o Debug::NoLocking=1 \
        -o APT::Sandbox::User=root \
        -o APT::Install-Recommends=false \
        "$@"
}

# Fills the private lists of kind "deb" or "deb-src" from the first mirror that has the suite.
update_lists() {
    local kind=$1 mirror one options='' output=''
    mkdir -p "$work"/{state,lists/partial,cache/archives/partial,log}
    : >"$work/status"
    if [ -e "$keyring" ]; then options="[signed-by=$keyring]"; fi
    while read -r mirror; do
        for one in $suite; do
            printf '%s %s %s %s main\n' "$kind" "$options" "$mirror" "$one"
        done >"$work/sources.list"
        if output=$(private_apt -o APT::Update::Error-Mode=any update 2>&1); then return 0; fi
    done < <(machine_mirrors)
    [ -n "$output" ] || fail "no Debian mirror in this machine's apt sources"
    tail -n 10 <<<"$output" >&2
    fail "none of this machine's Debian mirrors gave the package lists of $suite"
}

# -- putting the prefix together ------------------------------------------------------------------

# Prints the path of a library by its name, as found below the root folder.
library_path() {
    local root=$1 name=$2 folder
    for folder in "usr/lib/$multiarch" "lib/$multiarch"; do
        if [ -e "$root/$folder/$name" ]; then
            printf '%s\n' "$root/$folder/$name"
            return 0
        fi
    done
    fail "CRIU needs $name, which is not below $root/usr/lib/$multiarch"
}

needed_by() { readelf --dynamic --wide "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'; }

# Makes the prefix from a criu program and the root folder where its libraries are.
assemble() {
    local root=$1 binary=$2 loader queue file name path
    mkdir -p "$prefix/lib"
    cp "$binary" "$prefix/criu.bin"
    loader=$(readelf --program-headers --wide "$binary" |
        sed -n 's/.*program interpreter: .*\/\([^/]*\)\]/\1/p')
    path=$(library_path "$root" "$loader")
    cp -L "$path" "$prefix/ld.so"
    queue=("$prefix/criu.bin")
    while [ "${#queue[@]}" -gt 0 ]; do
        file=${queue[0]}
        queue=("${queue[@]:1}")
        while read -r name; do
            if [ "$name" = "$loader" ] || [ -e "$prefix/lib/$name" ]; then continue; fi
            path=$(library_path "$root" "$name")
            cp -L "$path" "$prefix/lib/$name"
            queue+=("$prefix/lib/$name")
        done < <(needed_by "$file")
    done
    add_own_parts "$prefix"
}

# Adds to a prefix what is ours: a preloaded library, and the program that starts CRIU with it.
add_own_parts() {
    local prefix=$1
    command -v gcc >/dev/null || ensure_packages gcc libc6-dev
    quietly gcc -O2 -Wall -Werror -shared -fPIC -o "$prefix/lib/$limits_library" "$here/criu_limits.c"
    # Names no absolute path, so that the prefix can be moved, packed and unpacked elsewhere.
    cat >"$prefix/criu" <<WRAPPER
#!/bin/sh
here=\$(dirname "\$(readlink -f "\$0")")
exec "\$here/ld.so" --library-path "\$here/lib" --preload $limits_library "\$here/criu.bin" "\$@"
WRAPPER
    chmod 755 "$prefix" "$prefix/criu" "$prefix/criu.bin" "$prefix/ld.so"
}

from_packages() {
    local package
    ensure_packages binutils xz-utils
    say "downloading CRIU and its libraries from Debian $suite"
    update_lists deb
    quietly private_apt --download-only --target-release "${suite##* }" install criu
    mkdir "$work/root"
    for package in "$work"/cache/archives/*.deb; do
        dpkg-deb --extract "$package" "$work/root"
    done
    assemble "$work/root" "$work/root/usr/sbin/criu"
}

from_source() {
    local uri name size digest
    ensure_packages binutils "${source_packages[@]}"
    say "downloading CRIU's source from Debian $suite"
    update_lists deb-src
    # The original tarball only: its companion with Debian's changes is often gone from mirrors
    # already, and is not needed. Its digest comes from the signed index.
    read -r uri name size digest < <(private_apt --print-uris --download-only source criu |
        grep -E '\.orig\.tar\.[a-z0-9]+. ' | tr -d "'") || true
    [ -n "${digest:-}" ] || fail "the source index of $suite lists no original tarball of criu"
    quietly /usr/lib/apt/apt-helper -o APT::Sandbox::User=root \
        download-file "$uri" "$work/$name" "$digest"
    [ "$(stat --format=%s "$work/$name")" = "$size" ] || fail "$name is not $size bytes long"
    mkdir "$work/source"
    tar --extract --file "$work/$name" --directory "$work/source" --strip-components=1
    say "building $name (about a minute)"
    quietly make --directory "$work/source" -j "$(nproc)" criu NO_GNUTLS=1
    strip "$work/source/criu/criu"
    assemble '' "$work/source/criu/criu"
}

# -- accepting it ---------------------------------------------------------------------------------

# Shows why CRIU failed, and ends.
criu_failed() {
    grep -E 'Error|Warn' "$2" >&2 || tail -n 10 "$2" >&2 || true
    fail "CRIU could not $1 a small process here"
}

# Waits up to five seconds for a condition.
await() {
    local tries
    for ((tries = 0; tries < 500; tries++)); do
        if "$@"; then return 0; fi
        sleep 0.01
    done
    fail "waited in vain for: $*"
}

runs_sleep() { [ "$(cat "/proc/$1/comm" 2>/dev/null)" = sleep ]; }

is_gone() { [ ! -e "/proc/$1" ]; }

# Becomes a process that can be dumped: a session of its own, and no file but /dev/null. Whatever
# else make or the caller left open here, a pipe above all, could not be restored. It is another
# user's, which is harder to dump than root's.
become_sleeper() {
    local fd
    for fd in /proc/self/fd/*; do
        fd=${fd##*/}
        [ "$fd" -le 2 ] || exec {fd}>&-
    done
    exec setpriv --reuid 65534 --regid 65534 --clear-groups setsid sleep 600 </dev/null >/dev/null 2>&1
}

# Dumps a sleeping process, which ends it, and brings it back to life. Runs as root throughout.
smoke_test() {
    local criu=$1/criu
    images=$(mktemp -d)
    sleeper=
    trap 'rm -rf "$images"; [ -z "$sleeper" ] || kill -KILL "$sleeper" 2>/dev/null' EXIT
    trap 'exit 130' INT TERM
    become_sleeper &
    sleeper=$!
    # Without this the shell would report its death, which is what a dump is.
    disown "$sleeper"
    # Between fork and exec it still is this shell, whose files cannot be dumped.
    await runs_sleep "$sleeper"
    "$criu" dump -t "$sleeper" -D "$images" -o dump.log -v2 ||
        criu_failed dump "$images/dump.log"
    # Its process id must be free again before the restore; the shell reaps it.
    await is_gone "$sleeper"
    "$criu" restore --restore-detached --restore-sibling -D "$images" -o restore.log -v2 ||
        criu_failed restore "$images/restore.log"
    runs_sleep "$sleeper" || fail "the restored process is not alive"
}

install_by() {
    local route=$1
    # A sibling of DEST, so that the last step is a rename: DEST is whole or not there.
    mkdir -p "$(dirname "$dest")"
    work=$(mktemp -d "$(dirname "$dest")/.criu-build.XXXXXX")
    prefix=$work/prefix
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    "$route"
    is_installed "$prefix" || fail "got CRIU $(version_of "$prefix"), older than $version_min"
    say "testing: dump and restore of a small process"
    # In one process of root's own: CRIU may lack the right to look into other users' processes.
    as_root "$BASH" "$0" --smoke-test "$prefix"
    rm -rf "$dest"
    mv --no-target-directory "$prefix" "$dest"
    say "CRIU $(version_of "$dest") is in $dest"
}

main() {
    local route=''
    while [ $# -gt 0 ]; do
        case $1 in
        --from-packages) route=from_packages ;;
        --from-source) route=from_source ;;
        --smoke-test) # for this script itself
            smoke_test "$2"
            return 0
            ;;
        -h | --help)
            usage
            return 0
            ;;
        -*)
            usage >&2
            exit 2
            ;;
        *) break ;;
        esac
        shift
    done
    dest=$(realpath --no-symlinks --canonicalize-missing "${1:-$here/criu}")
    if is_installed "$dest"; then
        say "CRIU $(version_of "$dest") is in $dest already"
        return 0
    fi
    if [ -e "$dest/criu.bin" ] && is_new_enough "$dest"; then
        add_own_parts "$dest"
        is_installed "$dest" || fail "CRIU in $dest does not start with $limits_library"
        say "added $limits_library to CRIU $(version_of "$dest") in $dest"
        return 0
    fi
    # What is there will be replaced, so it has to be a prefix of ours, though a broken one.
    if [ -n "$(ls -A "$dest" 2>/dev/null)" ] && [ ! -e "$dest/criu.bin" ]; then
        fail "$dest holds something else than CRIU"
    fi
    command -v apt-get >/dev/null || fail "needs Debian's apt-get"
    if [ -n "$route" ]; then
        install_by "$route"
        return 0
    fi
    # In processes of their own: `set -e` does not work inside a condition.
    "$BASH" "$0" --from-packages "$dest" || {
        local status=$?
        [ "$status" -ne 130 ] || exit 130
        say "the packages did not do; building from source instead"
        "$BASH" "$0" --from-source "$dest"
    }
}

main "$@"
