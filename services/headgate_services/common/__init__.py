"""What several services do in the same way; each service has its own package beside this one."""
