{{/* Names, labels, and what several templates compute alike. */}}

{{- define "plait.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters, so that a pod's or a service's name stays within 63. */}}
{{- define "plait.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "plait.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "plait.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Selector of one component: [root, "frontend"]; of all: [root, ""]. */}}
{{- define "plait.selector" -}}
{{- $root := index . 0 }}{{ $component := index . 1 -}}
app.kubernetes.io/name: {{ include "plait.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
{{- with $component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "plait.labels" -}}
{{- $root := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: plait
{{ include "plait.selector" . }}
{{- end }}

{{- define "plait.image" -}}
{{- $image := .Values.image }}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (printf "%s-%s" .Chart.AppVersion (ternary "gpu" "cpu" (eq .Values.accelerator.kind "nvidia"))) }}
{{- end }}
{{- end }}

{{- define "plait.apiKeysSecret" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "plait.fullname" .)) }}
{{- end }}

{{- define "plait.clusterKeySecret" -}}
{{ .Values.clusterKey.existingSecret | default (printf "%s-cluster-key" (include "plait.fullname" .)) }}
{{- end }}

{{/* --model: a folder of the claim, or what `plait pull` has fetched. */}}
{{- define "plait.model" -}}
{{- if eq .Values.model.source "claim" -}}
/models/{{ .Values.model.id }}
{{- else -}}
{{ .Values.model.id }}
{{- end }}
{{- end }}

{{- define "plait.servedName" -}}
{{ .Values.model.servedName | default .Values.model.id }}
{{- end }}

{{/* --workers: where front ends look for workers. */}}
{{- define "plait.workers" -}}
{{- $root := . }}{{ $name := include "plait.fullname" . }}{{ $places := list }}
{{- range $role, $count := dict "prefill" .Values.prefill.groups "decode" .Values.decode.workers }}
{{- $service := printf "%s-%s" $name $role }}
{{- if eq $root.Values.discovery "kubernetes" }}
{{- $places = append $places (printf "k8s://%s:control" $service) }}
{{- else if eq $root.Values.discovery "dns" }}
{{- $places = append $places (printf "dns://%s:7000" $service) }}
{{- else }}
{{- range $i := until (int $count) }}
{{- $places = append $places (printf "tcp://%s-%d.%s:7000" $service $i $service) }}
{{- end }}
{{- end }}
{{- end }}
{{- join "," $places }}
{{- end }}

{{/* Whether a kind of another project is rendered: [root, auto|always|never, "group/version/Kind"]. */}}
{{- define "plait.has" -}}
{{- $root := index . 0 }}{{ $when := index . 1 -}}
{{- if or (eq $when "always") (and (eq $when "auto") ($root.Capabilities.APIVersions.Has (index . 2))) }}true{{ end }}
{{- end }}

{{/* Rules that no schema can express. Each message names the values and what would be accepted. */}}
{{- define "plait.check" -}}
{{- $v := .Values }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "plait.fullname" .)) }}
{{- fail (printf "release %s: its services would be called %s, which Kubernetes refuses; expected small letters, digits and -, a letter first, as the release's name or as fullnameOverride" .Release.Name (include "plait.fullname" .)) }}
{{- end }}
{{- if gt (int $v.prefill.hosts) 1 }}
{{- fail (printf "prefill.hosts %d: a prefill group runs on one host, its ranks share unix sockets and memory; expected 1. For more hosts raise prefill.groups: groups work side by side" (int $v.prefill.hosts)) }}
{{- end }}
{{- if and (eq $v.accelerator.kind "nvidia") (gt (int $v.prefill.cpSize) (int $v.accelerator.perHost)) }}
{{- fail (printf "prefill.cpSize %d: a group's ranks take one GPU each of one host, which has accelerator.perHost %d; expected %d or less, or more prefill.groups" (int $v.prefill.cpSize) (int $v.accelerator.perHost) (int $v.accelerator.perHost)) }}
{{- end }}
{{- if and (eq $v.model.source "claim") (not $v.model.claim.name) }}
{{- fail "model.claim.name is empty: with model.source claim expected the name of a PersistentVolumeClaim that holds the model" }}
{{- end }}
{{- if and (eq $v.discovery "static") (or (ne $v.prefill.autoscaling.kind "none") (ne $v.decode.autoscaling.kind "none")) }}
{{- fail "discovery static: front ends would not learn of workers that autoscaling adds; expected kubernetes or dns, or autoscaling.kind none" }}
{{- end }}
{{- if gt (int $v.transfer.minPort) (int $v.transfer.maxPort) }}
{{- fail (printf "transfer.minPort %d: is above transfer.maxPort %d; expected a range" (int $v.transfer.minPort) (int $v.transfer.maxPort)) }}
{{- end }}
{{- range $port := list 7000 7001 }}
{{- if and (le (int $v.transfer.minPort) $port) (ge (int $v.transfer.maxPort) $port) }}
{{- fail (printf "transfer.minPort %d, transfer.maxPort %d: %d is among them, where workers listen already; expected a range without it" (int $v.transfer.minPort) (int $v.transfer.maxPort) $port) }}
{{- end }}
{{- end }}
{{- if lt (sub (add $v.transfer.maxPort 1) $v.transfer.minPort) (mul 2 (int $v.prefill.cpSize)) }}
{{- fail (printf "transfer.minPort %d, transfer.maxPort %d: each rank of a pod takes two ports; expected %d ports or more" (int $v.transfer.minPort) (int $v.transfer.maxPort) (mul 2 (int $v.prefill.cpSize))) }}
{{- end }}
{{- if and $v.prefill.options.enable_nsa_prefill_cp_shared_kv (eq (int $v.prefill.cpSize) 1) }}
{{- fail "prefill.options.enable_nsa_prefill_cp_shared_kv: one rank has nobody to share with; expected prefill.cpSize 2 or more, or no such option" }}
{{- end }}
{{- if and (eq $v.transfer.protocol "rdma") (not $v.transfer.rdmaResource) }}
{{- fail "transfer.rdmaResource is empty: with transfer.protocol rdma expected the device plugin's resource, such as rdma/hca" }}
{{- end }}
{{- range $role := list "frontend" "prefill" "decode" }}
{{- range (index $v $role).env }}
{{- if hasPrefix "PLAIT_" .name }}
{{- $option := .name | trimPrefix "PLAIT_" | lower }}
{{- if has $option (list "home" "config" "pull_source") }}
{{- fail (printf "%s.env: %s is no option: the chart itself says where models and options are; expected options by name among %s.options, models by model.source" $role .name $role) }}
{{- end }}
{{- fail (printf "%s.env: %s: variables that begin with PLAIT_ are the chart's to set; expected %s among %s.options, if `plait %s --help` has --%s and the chart does not set it itself" $role .name $option $role $role (replace "_" "-" $option)) }}
{{- end }}
{{- end }}
{{- $options := (index $v $role).options }}
{{- range $option := keys $options | sortAlpha }}
{{- if and (hasPrefix "hicache_" $option) (not (hasKey $options "enable_hierarchical_cache")) }}
{{- fail (printf "%s.options.%s: means nothing without %s.options.enable_hierarchical_cache; expected both or neither" $role $option $role) }}
{{- end }}
{{- end }}
{{- range $label := list "name" "instance" "component" }}
{{- if hasKey (index $v $role).podLabels (printf "app.kubernetes.io/%s" $label) }}
{{- fail (printf "%s.podLabels: app.kubernetes.io/%s is what the chart finds its pods by; expected other labels" $role $label) }}
{{- end }}
{{- end }}
{{- $scaling := (index $v $role).autoscaling }}
{{- if and (ne $scaling.kind "none") (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- fail (printf "%s.autoscaling.minReplicas %d: is above maxReplicas %d" $role (int $scaling.minReplicas) (int $scaling.maxReplicas)) }}
{{- end }}
{{- end }}
{{- end }}
