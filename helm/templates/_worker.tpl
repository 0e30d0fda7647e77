{{/* A prefill group's or a decode worker's StatefulSet and headless service: [root, role, count]. */}}
{{- define "plait.worker" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}{{ $values := index $root.Values $role -}}
{{- $name := printf "%s-%s" (include "plait.fullname" $root) $role }}
{{- $isPrefill := eq $role "prefill" }}
{{- $onGpu := eq $root.Values.accelerator.kind "nvidia" }}
{{- $numGpus := ternary (int $root.Values.prefill.cpSize) 1 $isPrefill }}
{{- $hasShm := and $isPrefill (gt (int $root.Values.prefill.cpSize) 1) }}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name | quote }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "plait.labels" (list $root $role) | nindent 4 }}
spec:
  {{- if eq $values.autoscaling.kind "none" }}
  replicas: {{ index . 2 }}
  {{- end }}
  serviceName: {{ $name }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "plait.selector" (list $root $role) | nindent 6 }}
  template:
    metadata:
      {{- include "plait.podMetadata" (list $root $role) | nindent 6 }}
    spec:
      serviceAccountName: {{ include "plait.fullname" $root }}-worker
      automountServiceAccountToken: false
      {{- if $onGpu }}
      {{- with $root.Values.accelerator.runtimeClassName }}
      runtimeClassName: {{ . | quote }}
      {{- end }}
      {{- end }}
      {{- include "plait.podCommon" (list $root $role) | nindent 6 }}
      containers:
        - name: plait
          image: {{ include "plait.image" $root }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - {{ $role }}
            - --model={{ include "plait.model" $root }}
            - --device={{ ternary "cuda" "cpu" $onGpu }}
            - --listen=tcp://$(POD_IP):7000
            - --health-address=$(POD_IP):7001
            {{- if $isPrefill }}
            - --prefill-cp-size={{ $root.Values.prefill.cpSize }}
            {{- end }}
            - --transfer-host=$(POD_IP)
            - --transfer-protocol={{ $root.Values.transfer.protocol }}
            - --cluster-key-file=/etc/plait/cluster-key/key
            - --drain-timeout-s={{ $root.Values.drain.timeoutSeconds }}
          env:
            - name: POD_IP
              valueFrom:
                fieldRef: {fieldPath: status.podIP}
            - name: MC_MIN_RPC_PORT
              value: {{ $root.Values.transfer.minPort | quote }}
            - name: MC_MAX_RPC_PORT
              value: {{ $root.Values.transfer.maxPort | quote }}
            {{- include "plait.env" (list $root $role) | nindent 12 }}
          ports:
            - {name: control, containerPort: 7000}
            - {name: health, containerPort: 7001}
          {{- include "plait.probes" (list $root $role) | nindent 10 }}
          # Until front ends have seen that the pod leaves, it takes what they send; then it drains.
          lifecycle:
            preStop:
              exec:
                command: [sleep, {{ $root.Values.drain.delaySeconds | quote }}]
          resources:
            {{- $limits := deepCopy ($values.resources.limits | default dict) }}
            {{- if $onGpu }}
            {{- $_ := set $limits $root.Values.accelerator.resource $numGpus }}
            {{- end }}
            {{- if eq $root.Values.transfer.protocol "rdma" }}
            {{- $_ := set $limits $root.Values.transfer.rdmaResource 1 }}
            {{- end }}
            {{- toYaml (merge (dict "limits" $limits) $values.resources) | nindent 12 }}
          securityContext:
            {{- include "plait.containerSecurity" $root | nindent 12 }}
              {{- if eq $root.Values.transfer.protocol "rdma" }}
              add: [IPC_LOCK]
              {{- end }}
          volumeMounts:
            {{- include "plait.volumeMounts" $root | nindent 12 }}
            {{- if $hasShm }}
            - name: shm
              mountPath: /dev/shm
            {{- end }}
      volumes:
        {{- include "plait.volumes" $root | nindent 8 }}
        {{- include "plait.hubTokenVolume" $root | nindent 8 }}
        {{- if $hasShm }}
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {{ $root.Values.prefill.sharedMemory }}
        {{- end }}
---
# Control connections, by front ends{{ if $isPrefill }} and decode workers{{ end }}. No address of its own: each pod counts.
apiVersion: v1
kind: Service
metadata:
  name: {{ $name | quote }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "plait.labels" (list $root $role) | nindent 4 }}
spec:
  clusterIP: None
  # Fixed names must be found before their pods are ready; whoever asks for ready ones must not get others.
  publishNotReadyAddresses: {{ eq $root.Values.discovery "static" }}
  selector:
    {{- include "plait.selector" (list $root $role) | nindent 4 }}
  ports:
    - {name: control, port: 7000, targetPort: control}
    - {name: health, port: 7001, targetPort: health}
    {{- if not $isPrefill }}
    # The first of a range that no service can express. Prefill ranks come to the pods' own addresses.
    - {name: transfer, port: {{ $root.Values.transfer.minPort }}}
    {{- end }}
{{- end }}
