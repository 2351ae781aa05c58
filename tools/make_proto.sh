#!/bin/sh
# Writes the generated protocol code beside its .proto files; with --check only says whether it is fresh.
set -eu
bin=$(cd "$1" && pwd)
cd proto
out=.
if [ "${2:-}" = --check ]; then
	out=$(mktemp -d)
	trap 'rm -rf "$out"' EXIT
fi
"$bin/python" -m grpc_tools.protoc -I. --python_out="$out" --pyi_out="$out" ledgerlake/pb/*.proto
[ "$out" = . ] && exit 0
for made in "$out"/ledgerlake/pb/*; do
	cmp -s "$made" "ledgerlake/pb/$(basename "$made")" || {
		echo "proto/ledgerlake/pb/$(basename "$made") is stale: run 'make proto' and commit it" >&2
		exit 1
	}
done
