#!/bin/sh
# Import contracts. The three source roots are laid together first, as the wheel lays them, because the checker reads
# packages from one folder.
set -eu
bin=$(cd "$1" && pwd)
root=$(pwd)
walls=$(mktemp -d)
trap 'rm -rf "$walls"' EXIT
mkdir "$walls/ledgerlake"
cp -r proto/ledgerlake/. udfs/ledgerlake/. streaming/ledgerlake/. "$walls/ledgerlake"
cp wheel_init.py "$walls/ledgerlake/__init__.py"
cd "$walls"
PYTHONPATH="$walls" "$bin/lint-imports" --no-cache --config "$root/pyproject.toml"
