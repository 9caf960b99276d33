#!/usr/bin/env bash
# Rehearse a run of several hosts on this machine: processes on loopback, each with some CPU devices.
# Exit status: 0 where every process ended well, else 1.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: tpu_setup/rehearse.sh [OPTIONS] [EXPERIMENT.py [--SECTION.FIELD VALUE ...]]

  --processes N    processes, each in the place of a host (default: 2)
  --devices K      CPU devices a process (default: 2)
  --steps N        training steps (default: 3)
  --workdir DIR    holds the run (run/) and the logs process-<id>.log (default: a new temporary folder)
  --timeout S      seconds after which processes that still run are ended (default: 600)
  --python PYTHON  an interpreter with grpo_jax's dependencies (default: .venv/bin/python, else python3)

EXPERIMENT.py is experiments/quickstart.py by default. Batches are made small and divisible by the number of
devices; what is given after EXPERIMENT.py has the last word.
USAGE
}

die() {
    printf 'rehearse.sh: %s\n' "$1" >&2
    exit 2
}

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
processes=2 devices=2 steps=3 timeout=600 workdir='' python=''
while (($#)); do
    case $1 in
        --processes | --devices | --steps | --timeout | --workdir | --python)
            (($# >= 2)) || die "$1 needs a value"
            declare "${1#--}=$2"
            shift 2
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*) die "unknown option $1 (options of the run come after EXPERIMENT.py)" ;;
        *) break ;;
    esac
done
for option in processes devices steps timeout; do
    [[ ${!option} =~ ^[1-9][0-9]*$ ]] || die "--$option must be a whole number above 0, got ${!option}"
done
if [[ -z $python ]]; then
    python=$repository/.venv/bin/python
    [[ -x $python ]] || python=python3
fi
experiment=${1:-$repository/experiments/quickstart.py}
shift $(($# > 0))
[[ -n $workdir ]] || workdir=$(mktemp -d)
mkdir -p "$workdir"
workdir=$(cd "$workdir" && pwd)

total=$((processes * devices))
small=(
    --train.steps "$steps" --train.prompt-micro-batches 1 --warm-start.steps 2
    --rollout.num-prompts $((2 * total)) --warm-start.batch-size $((2 * total))
    --eval.num-problems "$total" --eval.batch-size "$total" --eval.samples 2
)
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

pids=()
statuses=()
stop_all() {
    local id
    for id in "${!pids[@]}"; do
        [[ -n ${statuses[id]} ]] || kill "$1" "${pids[id]}" 2>/dev/null || true
    done
}
trap 'stop_all -KILL' EXIT

# In job control's absence a background process ignores Ctrl-C, which a run takes as "save and end".
set -m
for ((id = 0; id < processes; id++)); do
    PYTHONPATH=$repository${PYTHONPATH:+:$PYTHONPATH} \
        JAX_PLATFORMS=cpu \
        XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices" \
        GRPO_JAX_COORDINATOR=127.0.0.1:$port \
        GRPO_JAX_NUM_PROCESSES=$processes \
        GRPO_JAX_PROCESS_ID=$id \
        "$python" -m grpo_jax train "$experiment" "${small[@]}" "$@" --workdir "$workdir/run" \
        >"$workdir/process-$id.log" 2>&1 </dev/null &
    pids+=("$!")
    statuses+=("")
done
set +m
trap 'stop_all -INT' INT
printf '%d processes with %d devices each; run and logs in %s\n' "$processes" "$devices" "$workdir"

# A process that fails leaves the others waiting for it: they get a short while, then are ended.
deadline=$((SECONDS + timeout))
failed=0
left=$processes
while ((left)); do
    for id in "${!pids[@]}"; do
        [[ -z ${statuses[id]} ]] || continue
        if ! kill -0 "${pids[id]}" 2>/dev/null; then
            wait "${pids[id]}" 2>/dev/null && statuses[id]=0 || statuses[id]=$?
            ((left -= 1)) || true
            if ((statuses[id])) && ((!failed)); then
                failed=1
                deadline=$((SECONDS + 20 < deadline ? SECONDS + 20 : deadline))
            fi
        fi
    done
    if ((left && SECONDS >= deadline)); then
        failed=1
        stop_all -KILL
    fi
    ((left == 0)) || sleep 0.5
done

for id in "${!pids[@]}"; do
    printf 'process %d: exit status %d\n' "$id" "${statuses[id]}"
done
if ((failed)); then
    for id in "${!pids[@]}"; do
        ((statuses[id] == 0)) || { printf -- '--- end of process-%d.log\n' "$id" && tail -n 15 "$workdir/process-$id.log"; }
    done
    exit 1
fi
