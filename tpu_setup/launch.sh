#!/usr/bin/env bash
# Set up every host of a TPU pod, start a run on all of them, look at it, stop it.
# Safe to run again: setup brings hosts up to date, start leaves a run that is going on alone.
set -euo pipefail

usage() {
    cat <<'USAGE'
usage: tpu_setup/launch.sh [--dry-run] [--project PROJECT] NAME ZONE COMMAND [ARGUMENTS]

  NAME, ZONE      the TPU's name and zone, as gcloud knows them
  --project       the project, where it is not gcloud's default
  --dry-run       print the commands, run none

commands:
  setup           copy the committed files (git HEAD) to every host and install them there
  start RUN EXPERIMENT.py [--SECTION.FIELD VALUE ...]
                  `grpo-jax train` on every host, in the background; RUN is the run's folder, on a file
                  system that all hosts share (see README.md)
  status          whether the run is alive on each host, and the last lines of its log
  stop            interrupt the run on every host (as Ctrl-C does: it saves, then ends)
USAGE
}

die() {
    printf 'launch.sh: %s\n' "$1" >&2
    exit 2
}

dry_run=0
gcloud_flags=()
while (($#)); do
    case $1 in
        --dry-run)
            dry_run=1
            shift
            ;;
        --project)
            (($# >= 2)) || die "--project needs a value"
            gcloud_flags+=("--project=$2")
            shift 2
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        -*) die "unknown option $1 (options of the run come after start RUN EXPERIMENT.py)" ;;
        *) break ;;
    esac
done
(($# >= 3)) || {
    usage >&2
    die "NAME, ZONE and COMMAND are needed"
}
name=$1 zone=$2 command=$3
shift 3

quoted() {
    local word
    for word in "$@"; do
        if [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
            printf '%s ' "$word"
        else
            printf "'%s' " "${word//\'/\'\\\'\'}"
        fi
    done
}

run() {
    if ((dry_run)); then
        quoted "$@"
        printf '\n'
    else
        "$@"
    fi
}

tpu_vm() {
    local verb=$1
    shift
    run gcloud compute tpus tpu-vm "$verb" "$@" --zone="$zone" --worker=all \
        ${gcloud_flags[@]+"${gcloud_flags[@]}"}
}

on_all() { tpu_vm ssh "$name" --command="$1"; }

# $HOME is each host's own. The process of a run is known on each host by its id in this file, beside the log.
# shellcheck disable=SC2016
home='$HOME/grpo_jax'
alive="pid=\$(cat $home/run.pid 2>/dev/null) && kill -0 \$pid 2>/dev/null"

case $command in
    setup)
        (($# == 0)) || die "setup takes no arguments"
        archive=$(mktemp -d)
        trap 'rm -rf "$archive"' EXIT
        repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
        run git -C "$repository" archive --format=tar.gz --output="$archive/grpo_jax.tar.gz" HEAD
        tpu_vm scp "$archive/grpo_jax.tar.gz" "$name:grpo_jax.tar.gz"
        # The code is laid anew, so that no file of an older version stays; environment and log are kept.
        on_all "set -e; ! { $alive; } || { echo 'a run is going on: stop it first' >&2; exit 1; }; \
mkdir -p $home; rm -rf $home/code; mkdir $home/code; tar -xzf \$HOME/grpo_jax.tar.gz -C $home/code; \
bash $home/code/tpu_setup/setup.sh --venv $home/venv tpu"
        ;;
    start)
        # Without job control (set -m) a background process would ignore the interrupt that stop sends.
        (($# >= 2)) || die "start needs RUN and EXPERIMENT.py"
        run_folder=$1
        # A folder inside the code would be lost at the next setup.
        [[ $run_folder == /* ]] || die "RUN must be an absolute path, got $run_folder"
        shift
        printf -v arguments '%q ' "$@" --workdir "$run_folder"
        on_all "set -e; if $alive; then echo \"already running (process \$pid)\"; exit 0; fi; cd $home/code; set -m; \
GRPO_JAX_COORDINATOR=auto nohup $home/venv/bin/grpo-jax train $arguments>> $home/run.log 2>&1 < /dev/null & \
echo \$! > $home/run.pid; echo started"
        ;;
    status)
        (($# == 0)) || die "status takes no arguments"
        on_all "if $alive; then echo \"\$(hostname): running (process \$pid)\"; \
else echo \"\$(hostname): not running\"; fi; tail -n 5 $home/run.log"
        ;;
    stop)
        (($# == 0)) || die "stop takes no arguments"
        on_all "if $alive; then kill -INT \$pid; echo \"\$(hostname): interrupted process \$pid\"; \
else echo \"\$(hostname): not running\"; fi"
        ;;
    *) die "unknown command $command (there are setup, start, status, stop)" ;;
esac
