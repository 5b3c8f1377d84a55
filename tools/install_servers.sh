#!/bin/bash
# Installs the Debian packages of Redis and PostgreSQL, which the tests dump and restore as examples
# of programs that nobody wrote for it. The tests start their own servers: none is left running
# here, none will start at boot, and no database cluster is made. Does nothing where both are there.

set -euo pipefail

program=install_servers
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=tools/apt.sh
source "$here/apt.sh"

policy=/usr/sbin/policy-rc.d
cluster_defaults=/etc/postgresql-common/createcluster.d

has_redis() { command -v redis-server >/dev/null; }

has_postgres() { compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; }

# Until this script ends, packages that want to start their service are told that they may not.
forbid_services() {
    [ ! -e "$policy" ] || return 0
    as_root install -m 755 /dev/stdin "$policy" <<<$'#!/bin/sh\nexit 101'
    trap 'as_root rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
}

# PostgreSQL's package would make a cluster and register it for boot.
forbid_cluster() {
    as_root mkdir -p "$cluster_defaults"
    as_root install -m 644 /dev/stdin "$cluster_defaults/no-main-cluster.conf" \
        <<<'create_main_cluster = false'
}

# What was there before was set up by somebody else, who may want it at boot: that stays.
keep_from_boot() { ! command -v systemctl >/dev/null || quietly as_root systemctl disable "$1"; }

install_redis() {
    ensure_packages redis-server
    keep_from_boot redis-server.service
    has_redis || fail "the package redis-server brought no program of that name"
}

install_postgres() {
    forbid_cluster
    ensure_packages postgresql
    keep_from_boot postgresql.service
    has_postgres || fail "the package postgresql brought no /usr/lib/postgresql/*/bin/initdb"
}

main() {
    if has_redis && has_postgres; then return 0; fi
    forbid_services
    has_redis || install_redis
    has_postgres || install_postgres
}

main "$@"
