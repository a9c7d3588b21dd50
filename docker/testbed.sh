#!/usr/bin/env bash
# The compose testbed, from bringing it up to removing it. `make testbed` and `make testbed-down` call this.
#   testbed.sh up       build, start, wait until everything is healthy, show scores being served
#   testbed.sh down     remove its containers, networks, volumes and image
#   testbed.sh engine   say whether a Docker engine and compose answer
#   testbed.sh compose ARGUMENTS…   whichever compose is there, on the testbed: logs --follow client, up prometheus, …
# Environment: TESTBED_PROJECT (name, default relaygr-testbed), TESTBED_KAFKA_PORT and the other ports in compose.yaml,
# TORCH_INDEX_URL (an index that has the image's torch: torch.sh), COMPOSE_PROFILES=observability (Prometheus and Grafana too).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=${TESTBED_PROJECT:-relaygr-testbed}
image=relaygr-stream:cpu
READY_SECONDS=180  # Kafka takes about 8 s, a worker about 10 s; slow disks and a busy machine take several times that

say() { printf '%s\n' "$*"; }
step() { printf 'testbed: %3d s  %s\n' "$SECONDS" "$*"; }
die() { printf 'testbed: %s\n' "$*" >&2; exit 1; }

need_engine() {
  command -v docker >/dev/null || die "no Docker here. Install Docker Engine (docs.docker.com/engine/install) \
or a distribution's docker.io package with its docker-compose, start it, and run this again"
  docker info >/dev/null 2>&1 || die "no Docker engine answers. Start it (systemctl start docker, or Docker \
Desktop), check with \`docker info\` that this user may use it (group docker, or DOCKER_HOST), and run this again"
  if docker compose version >/dev/null 2>&1; then
    compose=(docker compose)
  elif docker-compose version >/dev/null 2>&1; then
    compose=(docker-compose)
  else
    die "the engine answers, but neither \`docker compose\` nor docker-compose is there. \
Install the package docker-compose-plugin or docker-compose and run this again"
  fi
  found="engine $(docker info --format '{{.ServerVersion}}'), ${compose[*]} $("${compose[@]}" version --short)"
  compose+=(--project-name "$project" --file "$here/compose.yaml")
}

ours() { printf 'label=com.docker.compose.project=%s' "$project"; }

# container SERVICE: the id of its container.
container() { docker ps --all --quiet --filter "$(ours)" --filter "label=com.docker.compose.service=$1"; }

# states: one line per container, "service state", where a state is a word.
states() {
  docker ps --all --filter "$(ours)" --format '{{.Label "com.docker.compose.service"}} {{.Status}}' |
    sed -E -e 's/ Up .*\(healthy\)$/ healthy/' -e 's/ Up .*\(unhealthy\)$/ unhealthy/' \
      -e 's/ Up .*\(health: starting\)$/ starting/' -e 's/ Up .*/ running/' \
      -e 's/ Exited \(0\).*/ done/' -e 's/ Exited \(([0-9]+)\).*/ failed(\1)/' -e 's/ Restarting .*/ restarting/' \
      -e 's/ Created$/ waiting/' | sort
}

# follow PID: print each change of state until that process, which starts the containers, has ended.
follow() {
  local starter=$1 seen='' now
  while :; do
    now=$(states)
    if [[ $now != "$seen" ]]; then
      comm -13 <(printf '%s\n' "$seen") <(printf '%s\n' "$now") | while read -r service state; do
        [[ -z $service ]] || step "$service: $state"
      done
      seen=$now
    fi
    kill -0 "$starter" 2>/dev/null || return 0
    ((SECONDS < READY_SECONDS)) || { kill "$starter"; return 1; }
    sleep 0.5
  done
}

# explain: what the containers that are not well said last.
explain() {
  local service state
  while read -r service state; do
    case $state in
      healthy | running | done | waiting) ;;
      *)
        say "--- $service is $state; its last lines:"
        docker logs --tail 20 "$(container "$service")" 2>&1 || true
        ;;
    esac
  done < <(states)
}

up() {
  local starter log
  log=$(mktemp)
  trap 'rm -f "$log"' RETURN
  step "building $image"
  "${compose[@]}" build topics
  SECONDS=0
  step "starting $project"
  "${compose[@]}" up --detach --no-build --remove-orphans >"$log" 2>&1 &
  starter=$!
  if ! follow "$starter" || ! wait "$starter"; then
    explain
    tail -n 20 "$log" >&2
    die "not healthy after $SECONDS s. Remove it with \`make testbed-down\`"
  fi
  show
  addresses
}

# show: a few rankings, asked for and printed by a service that runs beside the client.
show() {
  step "everything is healthy; a few rankings:"
  docker exec --interactive "$(container client)" python - <"$here/show.py" || { explain; die "no rankings"; }
}

addresses() {
  say ""
  say "Kafka, for clients on this machine: 127.0.0.1:${TESTBED_KAFKA_PORT:-29092}"
  say "The gateway: http://127.0.0.1:${TESTBED_GATEWAY_PORT:-8080}, token ${TESTBED_GATEWAY_TOKEN:-only-for-the-testbed}"
  if [[ ${COMPOSE_PROFILES-} == *observability* ]]; then
    say "Prometheus: http://127.0.0.1:${TESTBED_PROMETHEUS_PORT:-9090}"
    say "Grafana: http://127.0.0.1:${TESTBED_GRAFANA_PORT:-3000}"
  fi
  say "Watch it: docker/testbed.sh compose logs --follow client"
  say "Remove it: make testbed-down"
}

down() {
  step "removing containers, networks and volumes of $project"
  COMPOSE_PROFILES=observability "${compose[@]}" down --volumes --remove-orphans
  if docker image inspect "$image" >/dev/null 2>&1; then
    if docker rmi "$image" >/dev/null 2>&1; then
      step "removed the image $image; its base images and the build cache stay"
    else
      step "the image $image stays: a container uses it"
    fi
  fi
  # Builds leave images without a name behind: stages, and what had the name before.
  docker image prune --force --filter label=org.opencontainers.image.title=relaygr-stream >/dev/null
}

case ${1-} in
  up | down) need_engine && "$1" ;;
  compose) need_engine && "${compose[@]}" "${@:2}" ;;
  engine) need_engine && say "testbed: $found" ;;
  *) die "usage: testbed.sh up|down|engine|compose …" ;;
esac
