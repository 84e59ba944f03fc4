#!/usr/bin/env bash
# Starts one node of a run from a clone. The first start creates the environment. Then `fsbarrier run` takes over, with the
# same flags.
#
#   ./run.sh --demo                                          one machine, CPU: the whole loop, for real
#   ./run.sh --master --num-nodes 3 --rank-weights 1,1,1     node 0, from a clone on the shared filesystem
#   ./run.sh --worker 2                                      node 2: needs its rank and nothing else
#   ./run.sh --help                                          every flag
set -euo pipefail

clone="$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")"
# shellcheck source=scripts/environment.sh
source "$clone/scripts/environment.sh"

need= own=
for word in "$@"; do
  case "$word" in
    # These run nothing, so the light environment is enough.
    --dry-run | --help | -h) need=light ;;
    # The user's own program is loaded even to be shown, and may import anything.
    *.py) own=yes ;;
  esac
done
[ -z "$own" ] || need=
ensure_environment $need
# shellcheck disable=SC2154  # set by ensure_environment
exec "$python" -P -m fsbarrier run "$@"
