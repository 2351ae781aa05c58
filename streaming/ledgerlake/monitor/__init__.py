"""What people see of a running pipeline: progress, metrics, the status page, the live screen."""
