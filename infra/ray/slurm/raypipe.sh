#!/usr/bin/env bash
# A raypipe verb as a SLURM job, on one node or on several:
#
#   export RAYPIPE_ENV=…             # the folder of raypipe's environment; bin/raypipe is in it
#   sbatch infra/ray/slurm/raypipe.sh train mine.yaml
#   sbatch --nodes=4 --gpus-per-node=4 infra/ray/slurm/raypipe.sh train mine.yaml train.workers=16
#
# The first node gets Ray's head and the verb, each other node a worker. What sbatch is told on the command line goes before
# the lines below. The job ends with the verb's exit code.
#
# RAYPIPE_ENV             an environment that all nodes see; raypipe and Ray are installed in it
# RAYPIPE_NODES_WAIT_S    seconds to wait for the head, and then for all nodes; 300 if it is not set
#
#SBATCH --job-name=raypipe
#SBATCH --output=raypipe-%j.log
#SBATCH --open-mode=append
# One process a node starts Ray, which then has all CPUs and GPUs of the job there.
#SBATCH --ntasks-per-node=1
# Two minutes before the time limit the verb is told to save and to end. Submit the same command again to go on.
#SBATCH --signal=B:TERM@120
# After a lost node, or for a job that goes first: the verb goes on where it was.
#SBATCH --requeue
# shellcheck disable=SC2329  # traps and other nodes call functions
set -euo pipefail

: "${SLURM_JOB_ID:?this is a script for sbatch}"
: "${RAYPIPE_ENV:?the folder of raypipe\'s environment; bin/raypipe is in it}"
if [ ! -x "$RAYPIPE_ENV/bin/raypipe" ]; then
    echo "No bin/raypipe in RAYPIPE_ENV=$RAYPIPE_ENV on $(hostname)" >&2
    exit 2
fi
if [ "$#" -eq 0 ]; then
    echo "No verb. Write: sbatch infra/ray/slurm/raypipe.sh train mine.yaml" >&2
    exit 2
fi
export PATH="$RAYPIPE_ENV/bin:$PATH"
export RAY_USAGE_STATS_ENABLED=0
# Nothing runs on a node that is stopped: Ray need not wait for it to drain.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
wait_s=${RAYPIPE_NODES_WAIT_S:-300}

# Ray's sockets lie below its temporary folder, and their paths may have 107 characters: so not TMPDIR, which may be long.
# The job's number keeps two jobs of one node apart.
ray_folder() { echo "/tmp/raypipe-$SLURM_JOB_ID-$1"; }

# So many free ports of this node, one a line. All are held until the last is found, so no two are equal.
free_ports() {
    python -c 'import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in held:
    each.bind(("", 0))
print(*[each.getsockname()[1] for each in held], sep="\n")' "$1"
}

# Ends `ray start`, which ends the rest of Ray on this node.
end_ray() {
    local tries
    kill -TERM "$1" 2> /dev/null || return 0
    for tries in {1..50}; do
        kill -0 "$1" 2> /dev/null || return 0
        sleep 0.2
    done
    echo "Ray on $(hostname) is killed: it did not end in $((tries / 5)) s"
    # The kernel ends its children with it.
    kill -KILL "$1" 2> /dev/null || true
}

# Ray on one node, as the process of a step: head, or worker. It ends when standard input does, that is with the script that
# holds the other end, or by a signal, and takes its folder with it.
# The ports that Ray has defaults for are the same in every job, so each gets one that is free.
ray_node() {
    local ray_pid watch_pid code=0 memory_mb ports more=()
    folder=$(ray_folder "$1-$SLURM_PROCID")
    # A job that was requeued to this node left one. Somebody else's is not deleted: mkdir fails then.
    if [ -O "$folder" ] && [ ! -L "$folder" ]; then rm -rf "$folder"; fi
    mkdir -m 700 "$folder"
    export RAY_TMPDIR=$folder
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 143' TERM INT # until Ray runs
    mapfile -t ports < <(free_ports 3)
    # Without these Ray takes what the whole node has.
    more+=(--num-cpus="${SLURM_CPUS_ON_NODE:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}")
    memory_mb=${SLURM_MEM_PER_NODE:-$((${SLURM_MEM_PER_CPU:-0} * ${SLURM_CPUS_ON_NODE:-1}))}
    if [ "$memory_mb" -gt 0 ]; then
        # A third for the object store, as Ray would take of a node of its own.
        more+=(--memory=$((memory_mb * 1048576 * 6 / 10)) --object-store-memory=$((memory_mb * 1048576 * 3 / 10)))
    fi
    if [ "$1" = head ]; then
        # The verb needs no dashboard. Its part that stays gets a port of its own, too.
        more+=(--head --port="${RAY_ADDRESS##*:}" --node-ip-address="${RAY_ADDRESS%:*}" --include-dashboard=false)
        more+=(--ray-client-server-port="${ports[1]}" --dashboard-port="${ports[2]}")
    else
        more+=(--address="$RAY_ADDRESS")
    fi
    ray start --block < /dev/null --temp-dir="$folder/ray" --dashboard-agent-listen-port="${ports[0]}" \
        --min-worker-port=0 --max-worker-port=0 --disable-usage-stats "${more[@]}" &
    ray_pid=$!
    # `cat` ends with standard input. It gets 0 by name, because a command in the background reads nothing.
    { cat > /dev/null; touch "$folder/told"; end_ray "$ray_pid"; } <&0 &
    watch_pid=$!
    trap 'touch "$folder/told"; end_ray "$ray_pid"' TERM INT
    # `wait` returns early when a signal comes, so it is asked until Ray has ended.
    while kill -0 "$ray_pid" 2> /dev/null; do
        code=0
        wait "$ray_pid" || code=$?
    done
    kill "$watch_pid" 2> /dev/null || true
    if [ -e "$folder/told" ]; then return 0; fi
    return "$code"
}

# The address of this node that the others reach. A node by itself needs none but loopback.
own_address() {
    if [ "${#hosts[@]}" -eq 1 ]; then
        echo 127.0.0.1
        return
    fi
    # NodeAddr is where SLURM itself reaches a node. The way to it leaves by the interface that is wanted. Nothing is sent.
    local other
    other=$(scontrol show node "${hosts[1]}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    python -c 'import socket, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect((sys.argv[1], 9))
print(probe.getsockname()[0])' "$other"
}

# Until so many nodes have joined, the head first: with workers=auto a verb takes what is there.
wait_for_nodes() {
    without_holds python -c 'import os, sys, time
import ray
wanted, until, steps = int(sys.argv[1]), time.monotonic() + float(sys.argv[2]), sys.argv[3:]
found, why = 0, "nothing answers"
while time.monotonic() < until:
    try:
        if not ray.is_initialized():
            ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
        found = sum(node["Alive"] for node in ray.nodes())
    except (ConnectionError, RuntimeError, TimeoutError) as e:
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
    if found >= wanted:
        sys.exit(0)
    if not all(os.path.exists(f"/proc/{step}") for step in steps):
        sys.exit("Ray ended on a node; its last lines are above")
    time.sleep(0.5)
sys.exit(f"{found} of {wanted} nodes joined in {sys.argv[2]} s" + ("" if found else f": {why}"))' "$1" "$wait_s" "${steps[@]}"
}

steps=() # process ids of srun
holds=() # the standard input of each
# Ends the steps, and waits until their processes are gone. SIGTERM for srun or a step would reach all of Ray at once, and
# SIGKILL soon after, so the step's standard input is closed. If a step does not end by that, its srun is told.
stop_ray() {
    trap '' TERM INT
    local hold tries
    for hold in "${holds[@]}"; do exec {hold}>&-; done
    for tries in {1..100}; do
        kill -0 "${steps[@]}" 2> /dev/null || break
        sleep 0.2
    done
    if [ "$tries" -eq 100 ]; then kill -TERM "${steps[@]}" 2> /dev/null || true; fi
    wait "${steps[@]}" 2> /dev/null || true
}

# Runs a command without the ends that the steps wait for: a process that it leaves behind would keep them.
without_holds() {
    local hold
    for hold in "${holds[@]}"; do exec {hold}>&-; done
    exec "$@"
}

# A step on the nodes of the list; it shares the job's CPUs with the verb.
on_nodes() {
    local nodes=$1 count=$2 role=$3 hold
    exec {hold}> >(without_holds srun --overlap --cpu-bind=none --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$nodes" \
        --kill-on-bad-exit=1 bash -c "set -euo pipefail
$(declare -f ray_folder free_ports end_ray ray_node)
ray_node $role")
    steps+=("$!")
    holds+=("$hold")
}

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# A token of this job alone. The environment of a step is the job owner's to read, and nobody else's.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_ADDRESS="$(own_address):$(free_ports 1)"
export RAY_ADDRESS
RAY_TMPDIR=$(ray_folder head-0)
export RAY_TMPDIR

trap stop_ray EXIT
child=
told=
# The verb saves what it has begun; Ray goes when the verb has ended.
tell() {
    told=yes
    if [ -n "$child" ]; then kill -TERM "$child" 2> /dev/null || true; fi
}
trap tell TERM INT

# Runs a command beside this shell, because bash hears no signal while it waits for one before it. Its exit code is in `code`.
follow() {
    "$@" &
    child=$!
    code=0
    # A signal ends `wait` before the command ends.
    while kill -0 "$child" 2> /dev/null; do
        code=0
        wait "$child" || code=$?
    done
    child=
}

# The same, for what comes before the verb: the job ends with it if it fails.
need() {
    follow "$@"
    if [ -n "$told" ]; then exit 143; fi
    if [ "$code" -ne 0 ]; then exit "$code"; fi
}

on_nodes "${hosts[0]}" 1 head
need wait_for_nodes 1
if [ "${#hosts[@]}" -gt 1 ]; then
    others=$(IFS=,; echo "${hosts[*]:1}")
    on_nodes "$others" $((${#hosts[@]} - 1)) worker
    need wait_for_nodes "${#hosts[@]}"
fi
echo "Ray on ${#hosts[@]} node(s), head ${hosts[0]}"

follow without_holds raypipe "$@"
if [ -n "$told" ]; then echo "The job was told to end; the verb ended with $code"; fi
exit "$code"
