# Sourced by run.sh and scripts/check.sh, which set $clone. `ensure_environment [dev|light]` sets $python to the interpreter of a
# ready environment. If there is none, it first creates one (scripts/setup_env.py). `light` is for commands that only print
# something: any environment will do, and a small one is created only if there is no full one.
#
#   FSBARRIER_VENV    where the environment is, default <clone>/.venv; your own virtual environment there is used unchanged
#   FSBARRIER_PYTHON  the Python to create it with, default: python3, else the newest of python3.14 … python3.11
#   FSBARRIER_FLAVOR  cpu, cuda or rocm, default: cuda if an NVIDIA driver is present, else cpu

fail() {
  printf 'fsbarrier: %s\n' "$1" >&2
  exit 2
}

choose_flavour() {
  flavour="${FSBARRIER_FLAVOR:-}"
  if [ -z "$flavour" ]; then
    flavour=cpu
    local sign
    for sign in /proc/driver/nvidia/version /dev/nvidiactl /usr/lib/*/libcuda.so.1 /usr/lib64/libcuda.so.1 \
      /usr/lib/wsl/lib/libcuda.so.1; do
      if [ -e "$sign" ]; then flavour=cuda; fi
    done
    if [ $flavour = cpu ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then flavour=cuda; fi
  fi
  case "$flavour" in cpu | cuda | rocm) ;; *) fail "FSBARRIER_FLAVOR=$flavour: it is cpu, cuda or rocm" ;; esac
}

# Prints pyXYZ if the packages support this interpreter, else fails.
python_tag() {
  "$1" -E -s -S -c 'import sys; v = sys.version_info; print(f"py{v[0]}{v[1]}") if (3, 11) <= v < (3, 15) else sys.exit(1)' 2>/dev/null
}

find_python() {
  local candidate
  if [ -n "${FSBARRIER_PYTHON:-}" ]; then
    command -v "$FSBARRIER_PYTHON" >/dev/null || fail "FSBARRIER_PYTHON=$FSBARRIER_PYTHON: there is no such program"
    tag="$(python_tag "$FSBARRIER_PYTHON")" || fail "FSBARRIER_PYTHON=$FSBARRIER_PYTHON: Python 3.11 to 3.14 is needed"
    base="$FSBARRIER_PYTHON"
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && tag="$(python_tag "$candidate")"; then
      base="$candidate"
      return
    fi
  done
  fail "Python 3.11 to 3.14 is needed and none is on PATH: install it, or set FSBARRIER_PYTHON to one"
}

# Finds a finished environment whose interpreter exists on this machine, without starting Python. One with the tools for
# development serves everybody; whoever needs the tools ($dev set) takes no other.
find_ready() {
  for environment in "$place-$flavour-$machine"-${1:-*}-"$digest"{,-dev-????????}; do
    case "$environment" in *"$dev") ;; *) continue ;; esac
    if [ -f "$environment/.made-for" ] && [ -x "$environment/bin/python" ]; then
      python="$environment/bin/python"
      read -r made_for <"$environment/.made-for" || true
      return 0
    fi
  done
  return 1
}

# Checks that an environment made by hand has the packages that every command needs.
check_own_environment() {
  local missing
  missing="$("$python" -c 'import importlib.util as u; print(*(n for n in ("filelock", "jinja2", "watchdog", "rich", "msgspec") if u.find_spec(n) is None))')" ||
    fail "$python does not run; FSBARRIER_VENV names the folder of a virtual environment"
  [ -z "$missing" ] || fail "$place has no $missing: $place/bin/python -m pip install -r $clone/scripts/requirements/cpu.txt (or cuda.txt, rocm.txt), and for CPUs $place/bin/python $clone/fsbarrier/doctor/torchvision_on_cpu.py"
}

ensure_environment() {
  local kernel machine place tag='' base='' digest dev='' made_for='' environment locks dev_lock=()
  read -r kernel machine < <(uname -sm)
  [ "$kernel" = Linux ] || fail "Linux is needed, this is $kernel"
  place="${FSBARRIER_VENV:-$clone/.venv}"
  case "$place" in /*) ;; *) place="$PWD/$place" ;; esac
  local link=(--link "$place")
  if [ ! -L "$place" ] && [ -x "$place/bin/python" ]; then
    python="$place/bin/python" # made by hand
    check_own_environment
  else
    choose_flavour
    locks="${FSBARRIER_REQUIREMENTS:-$clone/scripts/requirements}"
    digest="$(sha256sum <"$locks/$flavour.txt")" && digest="${digest:0:8}"
    if [ "${1:-}" = dev ]; then
      dev="$(sha256sum <"$locks/dev.txt")" && dev="-dev-${dev:0:8}"
      dev_lock=(--dev-lock "$locks/dev.txt")
    fi
    if [ -n "${FSBARRIER_PYTHON:-}" ]; then find_python; fi
    if [ "${1:-}" = light ] && ! find_ready "$tag"; then
      flavour=light link=()
      digest="$(sha256sum <"$locks/$flavour.txt")" && digest="${digest:0:8}"
    fi
    if ! find_ready "$tag"; then
      if [ $flavour = cpu ] && [ -z "${FSBARRIER_FLAVOR:-}" ] && [ -e /dev/kfd ]; then
        printf 'fsbarrier: this environment is for the CPU; for AMD accelerators set FSBARRIER_FLAVOR=rocm (docs/accelerators.md)\n' >&2
      fi
      find_python
      "$base" -E -s "$clone/scripts/setup_env.py" --environment "$place-$flavour-$machine-$tag-$digest$dev" "${link[@]}" \
        --lock "$locks/$flavour.txt" --clone "$clone" "${dev_lock[@]}" </dev/null || exit $?
      find_ready "$tag" || fail "the environment was made but cannot be found at $place-$flavour-$machine-$tag-$digest$dev"
    fi
  fi
  # An environment that another clone created, or a person, does not contain this clone's package.
  if [ "$made_for" != "$clone" ]; then export PYTHONPATH="$clone${PYTHONPATH:+:$PYTHONPATH}"; fi
}
