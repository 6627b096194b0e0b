#!/usr/bin/env bash
# Installs the wheel of spectrace, without extras, into an environment that serves with vLLM, and fails when a package that was
# there has changed. The environment is made when it is missing (about two minutes, 3.4 GB) and left as it was found, unless
# spectrace is to be kept in it.
#
#   bash tests/install_beside_vllm.sh FOLDER_OF_THE_ENVIRONMENT [keep]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${1:?the folder of the environment with vLLM}
python=${PYTHON:-python3}

if [ ! -e "$venv/bin/vllm" ]; then
    echo "Setting up $venv: once, a few minutes"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -q --no-deps -r "$root/requirements-vllm.txt"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
freeze() { "$venv/bin/pip" freeze --all --exclude spectrace | LC_ALL=C sort; }

# A copy is built, since a build leaves files behind that a later wheel would pick up.
mkdir "$work/source"
cp -R "$root"/{pyproject.toml,README.md,LICENSE,tracer,engine,replay,cli} "$work/source"
"$venv/bin/pip" uninstall -q -y spectrace 2>/dev/null || true
freeze >"$work/before"
"$venv/bin/pip" wheel -q --no-deps -w "$work" "$work/source"
"$venv/bin/pip" install -q "$work"/spectrace-*.whl
freeze >"$work/after"
"$venv/bin/python" -c 'import spectrace.tracer, vllm; print("imports beside vllm", vllm.__version__)'

added=$(LC_ALL=C comm -13 "$work/before" "$work/after")
echo "packages before: $(wc -l <"$work/before"), after: $(wc -l <"$work/after") and spectrace"
echo "added:" ${added:-nothing}
if LC_ALL=C comm -23 "$work/before" "$work/after" | grep .; then
    echo "installing spectrace changed or removed the packages above"
    exit 1
fi
if [ "${2:-}" != keep ]; then
    "$venv/bin/pip" uninstall -q -y spectrace $(sed 's/ *[=@].*//' <<<"$added")
    freeze >"$work/restored"
    diff "$work/before" "$work/restored"
fi
echo "no package that was there has changed"
