#!/usr/bin/env bash
# Fetches Oracle's MySQL into target/tools/mysql, for `make test-mysql`. Debian 12 has only MariaDB as a package; Debian's
# `sid` has MySQL. Its packages, with every library that they need, are unpacked into that folder and run with the folder's
# own loader. Nothing is installed into the system, and no root is needed.
#
# The mirror is the one in the machine's own apt sources (or DEBIAN_MIRROR), and what it serves is checked with the
# machine's own Debian keys. Any failure ends the script and leaves no half-made folder behind.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
tools="$root/target/tools"
place="$tools/mysql"
if [ -x "$place/bin/mysqld" ]; then
  exit 0
fi
fail() { echo "tools/mysql.sh: $*" >&2; exit 1; }

for needed in apt-get dpkg-deb; do
  command -v "$needed" >/dev/null || fail "$needed is missing; this script needs Debian"
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keys" ] || fail "$keys is missing; install debian-archive-keyring"
mirror="${DEBIAN_MIRROR:-$(apt-get indextargets --no-release-info --format '$(REPO_URI)' | grep -m 1 '/debian/$' || true)}"
[ -n "$mirror" ] || fail "the apt sources name no mirror of Debian; set DEBIAN_MIRROR"

mkdir -p "$tools"
new="$(mktemp -d "$tools/mysql.XXXXXX")"
trap 'rm -rf "$new"' EXIT
mkdir -p "$new"/apt/{lists,cache/archives}/partial "$new"/{packages,bin}
echo "deb [signed-by=$keys] $mirror sid main" >"$new/apt/sources.list"
apt() {
  apt-get -qq -o Dir::Etc::sourcelist="$new/apt/sources.list" -o Dir::Etc::sourceparts=- \
    -o Dir::State="$new/apt" -o Dir::State::status=/dev/null -o Dir::State::lists="$new/apt/lists" \
    -o Dir::Cache="$new/apt/cache" \
    -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=3 "$@"
}
echo "fetching MySQL from $mirror" >&2
apt update || fail "the index of sid could not be fetched"
# With an empty status every library is resolved, the C library too.
apt --yes --no-install-recommends --download-only install mysql-server-core \
  || fail "the packages could not be fetched"
for package in "$new"/apt/cache/archives/*.deb; do
  dpkg-deb --extract "$package" "$new/packages" || fail "$package could not be unpacked"
done

libraries="usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")"
loader="$(cd "$new/packages" && find "$libraries" -name 'ld-linux-*' | head -n 1)"
[ -n "$loader" ] || fail "the C library's package has no loader"
# The loader keeps the process id, so the server can be stopped and killed like any other. It needs no folder for files and
# no second port.
cat >"$new/bin/mysqld" <<END
#!/bin/sh
files=\$(dirname "\$(dirname "\$(readlink -f "\$0")")")/packages
exec "\$files/$loader" --library-path "\$files/$libraries" "\$files/usr/sbin/mysqld" "\$@" \
  --basedir="\$files/usr" --secure-file-priv=NULL --mysqlx=OFF
END
chmod +x "$new/bin/mysqld"
"$new/bin/mysqld" --no-defaults --version >&2 || fail "mysqld does not run"
rm -rf "$new/apt" "$place"
mv "$new" "$place"
