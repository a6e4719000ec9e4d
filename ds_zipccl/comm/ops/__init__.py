"""The collectives, one file each. A collective builds a request, asks for a decision, and names the schedule."""
