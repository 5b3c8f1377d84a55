#!/bin/bash
# Makes .venv at the root of the repository, with snapstore installed in place and the tools that
# lint and test it. A bare Debian 12 is enough: what is missing there comes from apt.
#
# Says one line per step, and nothing when all is done already.

set -euo pipefail

program=setup
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=tools/apt.sh
source "$here/apt.sh"

root=$(dirname "$here")
venv=$root/.venv
stamp=$venv/installed-for
# The first pip that knows --group.
pip_min=25.1

has_command() { command -v "$1" >/dev/null; }

# True for an interpreter that is new enough and can make virtual environments with pip.
is_suitable() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3; do
        if is_suitable "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# True when C extensions can be built for the interpreter that the environment will have.
has_headers() {
    local python
    python=$(find_python) || return 1
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

install_missing_programs() {
    local packages=()
    has_command make || packages+=(make)
    has_command git || packages+=(git)
    # A compiler needs the C library's headers, which the gcc package only recommends.
    has_command gcc || packages+=(gcc libc6-dev)
    find_python >/dev/null || packages+=(python3 python3-venv)
    # pyfuse3 is built here; fusermount3 mounts and unmounts for who is not root.
    has_command pkg-config && pkg-config --exists fuse3 || packages+=(libfuse3-dev pkg-config)
    has_command fusermount3 || packages+=(fuse3)
    has_headers || packages+=(python3-dev)
    [ "${#packages[@]}" -eq 0 ] || ensure_packages "${packages[@]}"
    find_python >/dev/null || fail "needs Python 3.11 or later with venv, and apt gave none"
}

# What the environment depends on: the declared dependencies, the interpreter and the place, for
# scripts of a virtual environment hold its absolute path.
fingerprint() {
    printf '%s\n' "$root"
    "$venv/bin/python" --version 2>&1
    sha256sum <"$root/pyproject.toml"
}

make_environment() {
    local python
    "$venv/bin/python" -c 'import pip' 2>/dev/null && grep -qxF "$root" "$stamp" 2>/dev/null && return 0
    python=$(find_python)
    # Clearing it would empty what it points to.
    [ ! -L "$venv" ] || fail ".venv is a link, to $(readlink "$venv"): remove it"
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
}

upgrade_pip() {
    local version
    version=$("$venv/bin/python" -c 'import pip; print(pip.__version__)')
    [ "$(printf '%s\n' "$pip_min" "$version" | sort -V | head -n 1)" = "$pip_min" ] && return 0
    say "upgrading pip from $version"
    quietly "$venv/bin/python" -m pip install --quiet --upgrade "pip>=$pip_min"
}

main() {
    cd "$root"
    install_missing_programs
    # Two runs at once would spoil each other's environment.
    exec 9<"$here/setup.sh"
    flock 9
    if [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint 2>/dev/null)" ]; then return 0; fi
    make_environment
    # From here until the end the environment counts as not installed.
    printf '%s\n' "$root" >"$stamp"
    upgrade_pip
    say "installing snapstore and its development tools"
    quietly "$venv/bin/python" -m pip install --quiet --group dev --editable .
    fingerprint >"$stamp"
    say "ready: .venv/bin/snapstore"
}

main "$@"
