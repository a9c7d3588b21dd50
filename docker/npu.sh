#!/usr/bin/env bash
# Starts relaygr with CANN's own environment, which a login shell of the base image would read.
for settings in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh; do
  if [[ -r $settings ]]; then
    # shellcheck source=/dev/null  # belongs to the base image
    source "$settings"
    break
  fi
done
exec relaygr "$@"
