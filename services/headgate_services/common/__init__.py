"""What several services have in common; each service has its own package beside this one."""
