"""YAML documents and safetensors headers: read, checked, and turned into frozen values."""
