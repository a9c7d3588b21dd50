{{/* Reading values: numbers as text, settings, groups, secrets. A value that comes back as a dict is JSON. */}}

{{/* A value as a variable's text: 2 and not 2.0, 1000000000 and not 1e+09. */}}
{{- define "relaygr.text" -}}
{{- if or (kindIs "string" .) (kindIs "bool" .) }}{{ . }}
{{- else if eq (floor .) (float64 .) }}{{ printf "%.0f" (float64 .) }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{/* A value in TOML: text and lists as in JSON. */}}
{{- define "relaygr.toml" -}}
{{- if kindIs "string" . }}{{ toJson . }}
{{- else if kindIs "slice" . }}[{{ range $i, $each := . }}{{ if $i }}, {{ end }}{{ include "relaygr.toml" $each }}{{ end }}]
{{- else }}{{ include "relaygr.text" . }}
{{- end }}
{{- end }}

{{/* fleet.toml. */}}
{{- define "relaygr.fleet" -}}
{{- range $section, $keys := omit .Values.fleet "scenario" }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ include "relaygr.toml" $value }}
{{- end }}
{{ end }}
{{- range $name, $keys := .Values.fleet.scenario }}
[scenario.{{ $name }}]
{{- range $key, $value := $keys }}
{{ $key }} = {{ include "relaygr.toml" $value }}
{{- end }}
{{ end }}
{{- end }}

{{/* The variable of a setting. */}}
{{- define "relaygr.variable" -}}
RELAYGR_{{ . | replace "." "_" | upper }}
{{- end }}

{{/* A setting's effective value, as text: of the component, of fleet.toml, or its default. (root, options, key, default) */}}
{{- define "relaygr.setting" -}}
{{- $parts := splitList "." .key }}
{{- $section := index .root.Values.fleet (first $parts) | default dict }}
{{- $value := .default }}
{{- if hasKey $section (last $parts) }}{{ $value = index $section (last $parts) }}{{ end }}
{{- if hasKey (.options.settings | default dict) .key }}{{ $value = index .options.settings .key }}{{ end }}
{{- include "relaygr.text" $value }}
{{- end }}

{{/* Bytes of a size: 1073741824, "24GiB". (of: its setting, text) */}}
{{- define "relaygr.bytes" -}}
{{- if not (regexMatch "^\\s*[0-9]+(\\.[0-9]+)?\\s*([KMGTkmgt][iI][bB]|[bB])?\\s*$" .text) }}
{{- fail (printf "%s = %q is no size: write a number of bytes, or one with KiB, MiB, GiB or TiB" .of .text) }}
{{- end }}
{{- $factors := dict "" 1 "k" 1024 "m" 1048576 "g" 1073741824 "t" 1099511627776 }}
{{- $factor := index $factors (regexFind "[KMGTkmgt]" .text | lower) }}
{{- printf "%.0f" (floor (mulf (regexFind "[0-9]+(\\.[0-9]+)?" .text | float64) $factor)) }}
{{- end }}

{{/* The groups by name: `workers`, and over it what the group has. */}}
{{- define "relaygr.groups" -}}
{{- $groups := dict }}
{{- $own := .Values.groups | default dict }}
{{- range $name, $keys := .Values.fleet.scenario }}{{ if not $keys.served_by }}{{ $_ := set $groups $name dict }}{{ end }}{{ end }}
{{- if or (not $groups) (hasKey $own "default") }}{{ $_ := set $groups "default" dict }}{{ end }}
{{- if hasKey $own "next" }}{{ $_ := set $groups "next" dict }}{{ end }}
{{- if hasKey $own "reserve" }}
{{- if not (and .Values.fleet.scenario (eq .Values.planner.mode "act")) }}
{{- fail "groups.reserve: these workers stand by until a planner moves them to a scenario; set planner.mode to act, and fleet.scenario" }}
{{- end }}
{{- $_ := set $groups "reserve" dict }}
{{- end }}
{{- range $name, $options := $own }}
{{- if not (hasKey $groups $name) }}
{{- fail (printf "groups.%s: fleet.scenario has no %s with workers of its own; a group is such a scenario's, or default, next or reserve" $name $name) }}
{{- end }}
{{- $_ := set $groups $name $options }}
{{- end }}
{{- range $name, $options := $groups }}
{{- $scenario := index ($.Values.fleet.scenario | default dict) $name | default dict }}
{{- $least := $scenario.min_workers | default 1 | int }}
{{- $group := mergeOverwrite (deepCopy $.Values.workers) (deepCopy $options) }}
{{- $_ := set $group "replicas" (ternary $group.replicas $least (hasKey $group "replicas") | int) }}
{{- if and (lt $group.replicas $least) (hasKey ($.Values.fleet.scenario | default dict) $name) }}
{{- fail (printf "groups.%s.replicas is %d, below min_workers = %d of fleet.scenario.%s" $name $group.replicas $least $name) }}
{{- end }}
{{- $_ := set $group "maxReplicas" ($group.maxReplicas | default (include "relaygr.setting" (dict "root" $ "options" $group "key" "kafka.partitions" "default" 0) | int) | default 64 | int) }}
{{- if lt $group.maxReplicas $group.replicas }}
{{- fail (printf "groups.%s.maxReplicas is %d, below its replicas, %d" $name $group.maxReplicas $group.replicas) }}
{{- end }}
{{- $_ := set $groups $name $group }}
{{- end }}
{{- toJson $groups }}
{{- end }}

{{/* The secrets of a component: those of `secrets` in sections that it uses, and its own. (root, component, options) */}}
{{- define "relaygr.secrets" -}}
{{- $sections := dict
  "worker" (list "kafka" "tls" "handover" "relay" "history" "telemetry")
  "trigger" (list "kafka" "tls" "handover" "telemetry")
  "gateway" (list "kafka" "tls" "relay" "gateway" "history" "telemetry")
  "planner" (list "kafka" "tls" "handover" "telemetry")
  "topics" (list "kafka" "tls" "handover") }}
{{- $found := dict }}
{{- range $key, $from := .root.Values.secrets }}
{{- if has (splitList "." $key | first) (index $sections $.component) }}{{ $_ := set $found $key $from }}{{ end }}
{{- end }}
{{- toJson (mergeOverwrite $found (deepCopy (.options.secrets | default dict))) }}
{{- end }}

{{/* MiB that a worker's memory must have: tiers, waiting requests, kept histories, overhead. (root, options) */}}
{{- define "relaygr.memory" -}}
{{- $bytes := dict }}
{{- range $key, $default := dict "worker.hbm_bytes" "1GiB" "worker.dram_bytes" "2GiB" "worker.max_waiting_bytes" "256MiB" "history.cache_bytes" "64MiB" }}
{{- $text := include "relaygr.setting" (dict "root" $.root "options" $.options "key" $key "default" $default) }}
{{- $_ := set $bytes $key (include "relaygr.bytes" (dict "of" $key "text" $text) | int64) }}
{{- end }}
{{- if ne "cpu" (include "relaygr.setting" (dict "root" .root "options" .options "key" "worker.device" "default" "cpu") | splitList ":" | first) }}
{{- $_ := set $bytes "worker.hbm_bytes" 0 }}
{{- /* torch pins the next power of two */ -}}
{{- $dram := index $bytes "worker.dram_bytes" }}
{{- if $dram }}
{{- range $i, $_ := until 50 }}
{{- if gt $dram 0 }}
{{- $power := 1 }}
{{- range until $i }}{{ $power = mul $power 2 }}{{ end }}
{{- if ge $power $dram }}{{ $_ := set $bytes "worker.dram_bytes" $power }}{{ $dram = 0 }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $sum := include "relaygr.bytes" (dict "of" "overhead" "text" (include "relaygr.text" .options.overhead)) | int64 }}
{{- range values $bytes }}{{ $sum = add $sum . }}{{ end }}
{{- div (add $sum 1048575) 1048576 }}
{{- end }}

{{/* Bytes of a quantity of Kubernetes: 8Gi, 8G, 512Mi, 1073741824. */}}
{{- define "relaygr.quantity" -}}
{{- $text := include "relaygr.text" . }}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?([KMGT]i?|k)?$" $text) }}{{ fail (printf "%q is no quantity of memory: write 8Gi" $text) }}{{ end }}
{{- $units := dict "" 1 "k" 1000 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- printf "%.0f" (floor (mulf (regexFind "[0-9]+(\\.[0-9]+)?" $text | float64) (index $units (regexFind "[KMGTk]i?$" $text)))) }}
{{- end }}
