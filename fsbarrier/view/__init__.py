"""Human-readable output: status, top, console, summary, report."""
