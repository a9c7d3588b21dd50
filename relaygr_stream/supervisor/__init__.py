"""A trigger and workers on one host, kept running: what systemd or Kubernetes do elsewhere."""
