"""What is measured: networks, tasks, and the work under each way of calling it."""
