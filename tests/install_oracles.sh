#!/usr/bin/env bash
# Makes the environments in which other implementations of drafts run, unless they are there (about three minutes, 1.6 GB): one for
# speculators, SpecForge and SGLang, and one for ModelOpt, which takes what it has no version of its own of from the first. Of
# older versions of SGLang the wheels lie beside the first: parts of their source are run.
#
#   bash tests/install_oracles.sh FOLDER FOLDER_FOR_MODELOPT
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

# An environment is whole once it holds a copy of the requirements that it was made of.
install() {
    if cmp -s "$2" "$1/requirements.txt"; then return; fi
    echo "Setting up $1: once, a few minutes"
    "$python" -m venv --clear "$1"
    "$1/bin/pip" install -q --no-deps -r "$2"
    if [ -n "${3:-}" ]; then realpath "$3"/lib/python3*/site-packages >"$(echo "$1"/lib/python3*/site-packages)/beside.pth"; fi
    cp "$2" "$1/requirements.txt"
}

install "$1" "$root/requirements-oracles.txt"
for version in 0.5.9 0.5.12; do
    if compgen -G "$1/wheels/sglang-$version-*.whl" >/dev/null; then continue; fi
    "$1/bin/pip" download -q --no-deps -d "$1/wheels" "sglang==$version"
done
install "$2" "$root/requirements-modelopt.txt" "$1"
