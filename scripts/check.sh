#!/usr/bin/env bash
# Runs all checks; CI runs this script. The first start creates the environment.
#
#   scripts/check.sh                  ruff, mypy --strict, import order, the everyday tests
#   scripts/check.sh --fast           without the tests that load torch or start vLLM
#   scripts/check.sh --all            also the tests marked slow: hundreds of killed nodes, minutes of chaos
#   scripts/check.sh tests/test_x.py  other arguments go to pytest
#
# Without other arguments several tests run in parallel: two more than there are cores, because many tests wait.
set -euo pipefail

clone="$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")"
# shellcheck source=scripts/environment.sh
source "$clone/scripts/environment.sh"

selection=(-m "not slow")
case "${1:-}" in
  --fast)
    shift
    selection=(-m "not engine and not torch and not slow")
    ;;
  --all)
    shift
    selection=()
    ;;
esac

if [[ $# -eq 0 ]]; then
  # Each worker begins with a part of the tests, in the order of their files' names but for the longest (tests/conftest.py), and takes
  # from the others once it has done its own.
  set -- -n "$(($(nproc) < 2 ? 3 : 4))" --dist worksteal
fi

ensure_environment dev
cd -- "$clone"
# Beside mypy, which needs one core: what each worker and each program of a test would otherwise compile for itself, and each
# time where PYTHONDONTWRITEBYTECODE is set. What is wrong with a test, pytest says below.
# shellcheck disable=SC2154  # set by ensure_environment
{
  env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q fsbarrier phases
  env -u PYTHONDONTWRITEBYTECODE "$python" -m pytest --collect-only
} >&/dev/null &
printf '== ruff\n'
"$python" -m ruff check fsbarrier phases scripts tests
"$python" -m ruff format --check fsbarrier phases scripts tests
printf '== mypy --strict\n'
"$python" -m mypy --strict fsbarrier phases scripts
printf '== the order of the rooms (pyproject.toml, [tool.importlinter])\n'
"$(dirname -- "$python")/lint-imports" --no-cache
printf '== size\n'
"$python" scripts/count_code.py fsbarrier phases
"$python" scripts/internal_imports.py
printf '== pytest\n'
wait
exec "$python" -m pytest --durations=10 "${selection[@]}" "$@"
