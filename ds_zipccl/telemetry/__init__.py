"""What happened: counters, and the table, the step log and the monitor events made of them."""
