"""Settings, the plan of work, and the small programs that workflow rules call."""
