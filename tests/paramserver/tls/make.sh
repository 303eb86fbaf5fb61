#!/usr/bin/env bash
# Makes the certificates of the tests anew: an authority, a server and a client signed by it, a stranger, and another
# authority with a server of its own.
# They are valid from 2020 to 2120, so that no clock is too early or too late for them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
cat >"$work/ca.conf" <<CONF
[ca]
default_ca = test
[test]
database = $work/index.txt
new_certs_dir = $work
rand_serial = yes
default_md = sha256
default_startdate = 20200101000000Z
default_enddate = 21200101000000Z
policy = any
unique_subject = no
[any]
commonName = supplied
CONF
touch "$work/index.txt"

make() { # file, common name, extensions, arguments of `openssl ca` that say who signs
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$2" -config <(printf '[req]\ndistinguished_name=dn\n[dn]\n') \
        -keyout "$1.key.pem" -out "$work/$1.csr" 2>/dev/null
    printf 'subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n%s\n' "$3" >"$work/$1.ext"
    openssl ca -batch -notext -config "$work/ca.conf" -extfile "$work/$1.ext" -in "$work/$1.csr" -out "$1.pem" "${@:4}" 2>/dev/null
}
is_ca=$'basicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,digitalSignature'
make authority "Headrace test authority" "$is_ca" -selfsign -keyfile authority.key.pem
make stranger "stranger" "$is_ca" -selfsign -keyfile stranger.key.pem
make server "localhost" "subjectAltName=DNS:localhost,DNS:shard.test,IP:127.0.0.1" -cert authority.pem -keyfile authority.key.pem
make client "trainer" "extendedKeyUsage=clientAuth" -cert authority.pem -keyfile authority.key.pem
make other-authority "Another test authority" "$is_ca" -selfsign -keyfile other-authority.key.pem
make other "other" "subjectAltName=IP:127.0.0.2" -cert other-authority.pem -keyfile other-authority.key.pem
rm authority.key.pem other-authority.key.pem
