"""Files for job schedulers: one value, a `JobSpec`, becomes an sbatch script, Kubernetes YAML or a file of a cloud.

Rendering is pure. The site's own programs (sbatch, kubectl) submit the files; nothing here imports torch.
"""
