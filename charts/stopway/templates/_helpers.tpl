{{- define "stopway.name" -}}
{{- if eq .Release.Name "stopway" }}stopway-operator{{ else }}{{ printf "%s-stopway-operator" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "stopway.labels" -}}
app.kubernetes.io/name: stopway-operator
app.kubernetes.io/part-of: stopway
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "stopway.selector" -}}
app.kubernetes.io/name: stopway-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
