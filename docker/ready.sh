#!/usr/bin/env bash
# Health check of a container: is the process ready? Bash alone, because a Python every few seconds costs more than
# the trigger does.
exec 3<>"/dev/tcp/127.0.0.1/${RELAYGR_TELEMETRY_PORT}" || exit 1
printf 'GET /readyz HTTP/1.0\r\nHost: localhost\r\n\r\n' >&3
read -r -t 2 _ status _ <&3
[[ $status == 200 ]]
