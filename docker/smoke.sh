#!/usr/bin/env bash
# Builds the images, brings the cluster up in an awkward order, puts load on it, kills a worker meanwhile, compares the
# answers, stops everything. The last line is "smoke ok".
#
# Needs a Docker engine with compose (`docker compose` or `docker-compose`) and Python 3.11 or newer.
# LOCKSTEP_DOCKER_ENGINE, if set, names a command that is called with "up" before and "down" after, for machines
# that have no engine running. LOCKSTEP_MODEL uses a snapshot of yours; it must divide by two.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s %s\n' "$(date +%T)" "$*"; }
engine() { [ -z "${LOCKSTEP_DOCKER_ENGINE:-}" ] || "$LOCKSTEP_DOCKER_ENGINE" "$1"; }

engine up
docker info >/dev/null 2>&1 || { echo "no Docker engine answers; start one" >&2; exit 1; }
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
compose+=(-p lockstep-smoke -f docker/compose.yaml)

work=$(mktemp -d)
mkdir "$work/results" && chmod 777 "$work/results"
export LOCKSTEP_RESULTS=$work/results LOCKSTEP_PORT=${LOCKSTEP_PORT:-50951}
LOCKSTEP_WORKER_SECRET=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
export LOCKSTEP_WORKER_SECRET

finish() {
  status=$?
  if [ $status -ne 0 ]; then
    "${compose[@]}" logs --no-color --tail 40 >&2 || true
  fi
  "${compose[@]}" --profile load down -v --remove-orphans --timeout 5 >/dev/null 2>&1 || true
  rm -rf "$work"
  engine down || true
  [ $status -eq 0 ] && echo "smoke ok"
  exit $status
}
trap finish EXIT

make -s .venv/.demo
python=.venv/bin/python

# The wheels that the images are built from: this checkout, and exactly the pinned packages, once.
wheels=docker/wheels
mkdir -p $wheels
rm -f $wheels/lockstep-*.whl
$python -m pip wheel -qq --no-deps --disable-pip-version-check -w $wheels .
rm -rf build
if ! cmp -s constraints.txt $wheels/.filled; then
  say "filling $wheels"
  $python -m pip download -qq --disable-pip-version-check --only-binary :all: --python-version 3.11 -d $wheels \
    -c constraints.txt -r docker/packages-worker.txt "${TORCH:-torch==2.13.0}"
  cp constraints.txt $wheels/.filled
fi

if [ -z "${LOCKSTEP_MODEL:-}" ]; then
  mkdir -p docker/models
  $python docker/make_model.py docker/models/random
  LOCKSTEP_MODEL=$PWD/docker/models/random
fi
export LOCKSTEP_MODEL

say "building"
for target in scheduler client worker; do
  docker build -q -f docker/Dockerfile --target $target -t lockstep-$target . >/dev/null
done
docker images --format '{{.Repository}} {{.Size}}' | grep '^lockstep-'

client() { "${compose[@]}" run --rm -T loadtest "$@"; }
ask() { client generate --server scheduler:50051 --patience 300 --prompt "Once upon a time" --seed 7 --max-tokens 300 --ignore-eos --logprobs 0 --json; }

say "the client first, then the scheduler, then the workers"
"${compose[@]}" up -d scheduler >/dev/null 2>&1
ask >"$work/alone.json" &
asked=$!
sleep 3
"${compose[@]}" up -d worker-1 >/dev/null 2>&1
sleep 3
"${compose[@]}" up -d worker-0 >/dev/null 2>&1
wait $asked
say "answered"
for _ in $(seq 60); do
  [ "$("${compose[@]}" ps -q | xargs docker inspect -f '{{.State.Health.Status}}' | sort -u)" = healthy ] && break
  sleep 1
done
"${compose[@]}" ps

say "load, and a worker is killed in the middle of it"
client loadtest --server scheduler:50051 --random --num 48 --input-len 32:128 --output-len 100:200 --concurrency 8 \
  --out /results/result.json --html /results/result.html >"$work/load.txt" 2>&1 &
load=$!
sleep 4
ask >"$work/crowd.json" &
asked=$!
sleep 3
victim=$("${compose[@]}" ps -q worker-1)
docker kill "$victim" >/dev/null
say "killed worker-1"
sleep 1
docker start "$victim" >/dev/null
wait $asked
wait $load || { cat "$work/load.txt"; echo "requests failed under load" >&2; exit 1; }
cat "$work/load.txt"
$python - "$work" <<'EOF'
import json, sys
from pathlib import Path
work = Path(sys.argv[1])
alone, crowd = (json.loads((work / name).read_text()) for name in ("alone.json", "crowd.json"))
for key in ("token_ids", "logprobs", "text"):
    assert alone["choices"][0][key] == crowd["choices"][0][key], f"{key} differ"
result = json.loads((work / "results" / "result.json").read_text())
assert result["failed"] == 0 and result["completed"] == 48, result["errors"]
print(f"300 tokens and their logprobs are the same alone and in the crowd with a worker killed; 48 of 48 requests ended well")
EOF
client stats --server scheduler:50051 --json | $python -c '
import json, sys
stats = json.load(sys.stdin)["stats"]
assert stats["recoveries_total"] >= 1, "no recovery happened, so nothing was tested"
print("recoveries:", int(stats["recoveries_total"]))'

say "stopping"
ids=$("${compose[@]}" ps -q)
"${compose[@]}" stop >/dev/null 2>&1
codes=$(docker inspect -f '{{.Name}} {{.State.ExitCode}}' $ids)
echo "$codes"
! echo "$codes" | grep -qv ' 0$' || { echo "a service did not stop gracefully" >&2; exit 1; }
