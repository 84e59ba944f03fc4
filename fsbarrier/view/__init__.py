"""What people see: status, top, console, summary, report."""
