#!/usr/bin/env bash
# Make a virtual environment with grpo_jax for one kind of device, and check that JAX sees it.
# Safe to run again: an environment that is there is brought up to date.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: tpu_setup/setup.sh [--venv DIR] [--python PYTHON] [--devices N] cpu|cuda|tpu

  --venv DIR       the environment (default: .venv in the repository)
  --python PYTHON  the interpreter it is made with (default: the newest Python from 3.11 on that is found;
                   where there is none, uv is installed for this user and brings one)
  --devices N      fail unless JAX sees N devices on this machine (default: at least one)
USAGE
}

die() {
    printf 'setup.sh: %s\n' "$1" >&2
    exit 2
}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repository/.venv
python=
devices=
platform=
while (($#)); do
    case $1 in
        --venv | --python | --devices)
            (($# >= 2)) || die "$1 needs a value"
            declare "${1#--}=$2"
            shift 2
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        cpu | cuda | tpu)
            platform=$1
            shift
            ;;
        *)
            usage >&2
            die "unknown argument $1"
            ;;
    esac
done
[[ -n $platform ]] || {
    usage >&2
    die "which devices: cpu, cuda or tpu?"
}
[[ -z $devices || $devices =~ ^[1-9][0-9]*$ ]] || die "--devices must be a whole number above 0, got $devices"

runs_and_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

make_environment() {
    local candidate
    for candidate in ${python:-python3.14 python3.13 python3.12 python3.11 python3}; do
        if runs_and_is_new_enough "$candidate"; then
            "$candidate" -m venv "$venv"
            return
        fi
    done
    [[ -z $python ]] || die "$python does not run or is older than Python 3.11"
    printf 'no Python from 3.11 on: uv brings one\n'
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --python 3.12 "$venv"
}

if runs_and_is_new_enough "$venv/bin/python"; then
    printf 'environment %s is there\n' "$venv"
else
    printf 'making environment %s\n' "$venv"
    make_environment
fi
# An environment made by uv holds no pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null

extra=
[[ $platform == cpu ]] || extra="[$platform]"
"$venv/bin/python" -m pip install --quiet --editable "$repository$extra"

# Only one process at a time can open a TPU: a run that goes on makes this check fail, and says so.
JAX_PLATFORMS=$platform "$venv/bin/python" - "$platform" "$devices" <<'PYTHON'
import sys

import jax

platform, wanted = sys.argv[1:]
try:
    found = jax.local_devices()
except RuntimeError as error:
    sys.exit(f"setup.sh: JAX sees no {platform} devices: {error}")
print(f"JAX {jax.__version__} sees {len(found)} local {platform} device(s): {found[0].device_kind}")
if wanted and len(found) != int(wanted):
    sys.exit(f"setup.sh: expected {wanted} devices, JAX sees {len(found)}")
PYTHON
