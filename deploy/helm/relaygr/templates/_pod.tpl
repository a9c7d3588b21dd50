{{/* The pod of one process. */}}

{{- define "relaygr.labels" -}}
app.kubernetes.io/name: relaygr
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* An object's labels. (root) */}}
{{- define "relaygr.about" -}}
{{ include "relaygr.labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What selects the pods of a component, or of one group's. (root, component, group) */}}
{{- define "relaygr.selector" -}}
{{ include "relaygr.labels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .group }}
relaygr/group: {{ . }}
{{- end }}
{{- end }}

{{/* NAME of RELEASE-NAME; a StatefulSet's pods have a label of it and ten characters more. */}}
{{- define "relaygr.name" -}}
{{- $name := printf "%s-%s" .root.Release.Name .name }}
{{- if gt (len $name) 52 }}
{{- fail (printf "the name %s has %d characters, and Kubernetes takes 52 here: shorten the release's" $name (len $name)) }}
{{- end }}
{{- $name }}
{{- end }}

{{/* The fleet's name for Prometheus. */}}
{{- define "relaygr.fleetName" -}}
{{ .Values.fleetName | default .Release.Name }}
{{- end }}

{{/* A pod's template. (root, component, group, options, command, variables: a dict, fields: variables by field path,
grace: seconds, config: the ConfigMap, restarts: what it has of fleet.toml, job: whether it ends, ports) */}}
{{- define "relaygr.pod" -}}
{{- $options := .options }}
{{- $secrets := include "relaygr.secrets" (dict "root" .root "component" .component "options" $options) | fromJson }}
{{- $variables := mergeOverwrite (dict "RELAYGR_TELEMETRY_HOST" "0.0.0.0" "RELAYGR_TELEMETRY_PORT" .root.Values.telemetryPort "TRITON_CACHE_DIR" "/tmp/triton") .variables }}
{{- range $key, $value := $options.settings }}
{{- $_ := set $variables (include "relaygr.variable" $key) $value }}
{{- end }}
metadata:
  labels:
    {{- include "relaygr.selector" . | nindent 4 }}
    {{- with $options.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    relaygr/settings: {{ .restarts | sha256sum | trunc 16 | quote }}  # a process reads its settings when it starts
    {{- with $options.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ .root.Values.serviceAccountName }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- if .job }}
  restartPolicy: OnFailure
  {{- end }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  securityContext:
    {{- $context := dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001 "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") }}
    {{- toYaml (mergeOverwrite $context (deepCopy .root.Values.podSecurityContext)) | nindent 4 }}
  topologySpreadConstraints:
    {{- if $options.topologySpreadConstraints }}
    {{- toYaml $options.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "relaygr.selector" . | nindent 10 }}
    {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
  {{- with index $options $key }}
  {{ $key }}: {{ toJson . }}
  {{- end }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ .root.Values.image.repository }}{{ with .root.Values.image.tag }}:{{ . }}{{ end }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: {{ toJson .command }}
      env:
        {{- range $name, $value := $variables }}
        - {name: {{ $name }}, value: {{ include "relaygr.text" $value | toJson }}}
        {{- end }}
        {{- range $name, $path := .fields }}
        - {name: {{ $name }}, valueFrom: {fieldRef: {fieldPath: {{ $path }}}}}
        {{- end }}
        {{- range $key, $_ := $secrets }}
        - {name: {{ include "relaygr.variable" $key }}_FILE, value: /etc/relaygr/secrets/{{ $key }}}
        {{- end }}
        {{- with $options.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        privileged: false
        capabilities: {drop: [ALL]}
      resources: {{ toJson $options.resources }}
      {{- if not .job }}
      ports:
        - {name: telemetry, containerPort: {{ .root.Values.telemetryPort }}}
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      # timeoutSeconds covers two further tries of a dropped connection.
      startupProbe: {httpGet: {path: /healthz, port: telemetry}, periodSeconds: 2, timeoutSeconds: 4, failureThreshold: {{ div ($options.startupSeconds | default 120) 2 }}}
      readinessProbe: {httpGet: {path: /readyz, port: telemetry}, periodSeconds: 2, timeoutSeconds: 4}
      livenessProbe: {httpGet: {path: /healthz, port: telemetry}, periodSeconds: 10, timeoutSeconds: 4, failureThreshold: 3}
      {{- end }}
      {{- if eq .component "gateway" }}
      lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}  # until the Service sends it no more requests
      {{- end }}
      volumeMounts:
        - {name: fleet, mountPath: /etc/relaygr/fleet, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if $secrets }}
        - {name: secrets, mountPath: /etc/relaygr/secrets, readOnly: true}
        {{- end }}
        {{- with .memoryAt }}
        - {name: dram, mountPath: {{ toJson . }}}
        {{- end }}
        {{- with $options.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: fleet, configMap: {name: {{ .config }}}}
    - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
    {{- if $secrets }}
    - name: secrets
      projected:
        defaultMode: 0440
        sources:
          {{- range $key, $from := $secrets }}
          - secret: {name: {{ $from.secret }}, items: [{key: {{ $from.key | toJson }}, path: {{ $key }}}]}
          {{- end }}
    {{- end }}
    {{- if .memoryAt }}
    - {name: dram, emptyDir: {medium: Memory}}
    {{- end }}
    {{- with $options.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
