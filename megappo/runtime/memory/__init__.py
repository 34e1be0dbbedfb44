"""Memory of processes, machines and devices."""
