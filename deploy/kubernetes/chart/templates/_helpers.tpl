{{/* Each takes a dict: root, the chart's context; name, the component's (gateway, verifier, drafter, redis). */}}

{{- define "outrider.fullname" -}}
{{ .root.Release.Name }}-{{ .name }}
{{- end }}

{{- define "outrider.selector" -}}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "outrider.image" -}}
{{- $values := get .root.Values .name -}}
{{ .root.Values.image.registry }}/outrider-{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- if and $values.gpus (not .root.Values.image.tag) }}-cuda{{ end }}
{{- end }}

{{/* Whether a model's name is a Hub id; anything below models/ lies on the claim. */}}
{{- define "outrider.isHubId" -}}
{{- if and . (not (hasPrefix "models/" .)) (not (hasPrefix "/" .)) }}yes{{ end }}
{{- end }}

{{- define "outrider.fetches" -}}
{{- include "outrider.isHubId" .Values.model }}{{ include "outrider.isHubId" .Values.draftModel }}
{{- end }}

{{- define "outrider.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What pods of ours have in common, above their containers. */}}
{{- define "outrider.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "outrider.selector" . | nindent 8 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Downloads Hub ids to the claim before the pod starts; what is there already is not asked for again. `models`: a list;
`weights`: whether they are wanted too. It runs the gateway's image, which has no torch. */}}
{{- define "outrider.fetch" -}}
{{- $values := .root.Values -}}
{{- $ids := list -}}
{{- range .models }}{{ if include "outrider.isHubId" . }}{{ $ids = append $ids . }}{{ end }}{{ end -}}
{{- with $ids }}
initContainers:
  - name: fetch
    image: {{ include "outrider.image" (dict "root" $.root "name" "gateway") }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: [/opt/venv/bin/python, -m, outrider.shared.checkpoint.fetch]
    args: {{- if not $.weights }}
      - --no-weights
      {{- end }}{{ toYaml . | nindent 6 }}
    env:
      - {name: HF_HUB_OFFLINE, value: "0"}
      - {name: HF_HOME, value: /app/models/hub}
      {{- with $values.hub.endpoint }}
      - {name: HF_ENDPOINT, value: {{ . | quote }}}
      {{- end }}
      {{- with $values.hub.tokenSecret }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ . }}, key: {{ $values.hub.tokenKey }}}
      {{- end }}
    resources:
      requests: {cpu: 250m, memory: 256Mi}
      limits: {memory: 1Gi}
    securityContext: {{- include "outrider.container-security" . | nindent 6 }}
    volumeMounts:
      - {name: models, mountPath: /app/models}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{/* Image, settings and flags of a service's container. Nothing is left to download: HF_HUB_OFFLINE is the image's. */}}
{{- define "outrider.container" -}}
name: {{ .name }}
image: {{ include "outrider.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- with (get .root.Values .name).args }}
args: {{- toYaml . | nindent 2 }}
{{- end }}
envFrom:
  - configMapRef: {name: {{ include "outrider.fullname" . }}}
securityContext: {{- include "outrider.container-security" . | nindent 2 }}
{{- end }}

{{- define "outrider.models-volume" -}}
name: models
persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim | default (printf "%s-models" .Release.Name) }}}
{{- end }}

{{- define "outrider.config" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "outrider.fullname" . }}
  labels: {{- include "outrider.labels" . | nindent 4 }}
data: {{- merge (dict) (get .root.Values .name).env .defaults (dict "HF_HOME" "/app/models/hub") | toYaml | nindent 2 }}
{{- end }}

{{- define "outrider.disruption-budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "outrider.fullname" . }}
  labels: {{- include "outrider.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "outrider.selector" . | nindent 6 }}
{{- end }}
