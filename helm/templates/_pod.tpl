{{/* Parts of every pod. A context is [root, role]. */}}

{{/* From a pod's end being asked for to its being killed: the delay, the drain, and what ending takes
     (a front end's last bytes, a group's ranks). */}}
{{- define "plait.gracePeriod" -}}
{{ add .Values.drain.delaySeconds .Values.drain.timeoutSeconds 30 }}
{{- end }}

{{- define "plait.podMetadata" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}{{ $values := index $root.Values $role -}}
labels:
  {{- include "plait.selector" (list $root $role) | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  kubectl.kubernetes.io/default-container: plait
  {{- with $values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "plait.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "plait.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "plait.scheduling" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}{{ $values := index $root.Values $role -}}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
topologySpreadConstraints:
  {{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "plait.selector" (list $root $role) | nindent 8 }}
  {{- end }}
{{- end }}

{{/* Options as variables: the chart's own come as flags, which win over these. */}}
{{- define "plait.env" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}{{ $values := index $root.Values $role -}}
- name: PLAIT_HOME
  value: /models
- name: HF_HOME
  value: /models/huggingface
- name: HF_HUB_OFFLINE
  value: "1"
{{- range $name, $value := merge (dict) $values.options $root.Values.options }}
- name: PLAIT_{{ upper $name }}
  {{- if kindIs "slice" $value }}
  value: {{ join "," $value | quote }}
  {{- else if kindIs "string" $value }}
  value: {{ $value | quote }}
  {{- else }}
  value: {{ toJson $value | quote }}
  {{- end }}
{{- end }}
{{- with $values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "plait.probes" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}{{ $values := index $root.Values $role -}}
{{- $port := ternary "http" "health" (eq $role "frontend") -}}
startupProbe:
  httpGet: {path: /health, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add $values.startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /live, port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end }}

{{- define "plait.volumeMounts" -}}
- name: models
  mountPath: /models
  readOnly: true
- name: cluster-key
  mountPath: /etc/plait/cluster-key
  readOnly: true
- name: home
  mountPath: /var/lib/plait
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "plait.volumes" -}}
- name: models
  {{- if eq .Values.model.source "claim" }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim.name | quote }}
    readOnly: true
  {{- else if eq .Values.model.pull.volume "claim" }}
  persistentVolumeClaim:
    claimName: {{ include "plait.fullname" . }}-models
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.model.pull.size }}
  {{- end }}
- name: cluster-key
  secret:
    secretName: {{ include "plait.clusterKeySecret" . | quote }}
    # Not for everybody to read: plait refuses a key that is.
    defaultMode: 0440
    items:
      - key: {{ .Values.clusterKey.secretKey | quote }}
        path: key
- name: home
  emptyDir:
    sizeLimit: 1Gi
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
{{- end }}

{{/* `plait pull` before the start: at once done where the model is there. */}}
{{- define "plait.initContainers" -}}
{{- if eq .Values.model.source "pull" }}
initContainers:
  - name: pull
    image: {{ include "plait.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    args: [pull, {{ .Values.model.id | quote }}]
    env:
      - name: PLAIT_HOME
        value: /models
      - name: HF_HOME
        value: /models/huggingface
      {{- with .Values.model.pull.tokenSecret }}
      - name: HF_TOKEN_PATH
        value: /etc/plait/hub/token
      {{- end }}
    resources:
      requests: {cpu: "1", memory: 2Gi}
      limits: {memory: 4Gi}
    securityContext:
      {{- include "plait.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - name: models
        mountPath: /models
      - name: home
        mountPath: /var/lib/plait
      - name: tmp
        mountPath: /tmp
      {{- if .Values.model.pull.tokenSecret }}
      - name: hub-token
        mountPath: /etc/plait/hub
        readOnly: true
      {{- end }}
{{- end }}
{{- end }}

{{- define "plait.hubTokenVolume" -}}
{{- if and (eq .Values.model.source "pull") .Values.model.pull.tokenSecret }}
- name: hub-token
  secret:
    secretName: {{ .Values.model.pull.tokenSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ .Values.model.pull.tokenSecretKey | quote }}
        path: token
{{- end }}
{{- end }}

{{- define "plait.podCommon" -}}
{{- $root := index . 0 }}{{ $role := index . 1 -}}
# Without this a service named like the release would set PLAIT_PORT and others.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "plait.gracePeriod" $root }}
securityContext:
  {{- include "plait.podSecurity" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- include "plait.scheduling" . }}
{{- include "plait.initContainers" $root }}
{{- end }}
