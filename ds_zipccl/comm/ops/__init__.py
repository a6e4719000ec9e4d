"""The collectives, one file each: it builds a request, asks for a decision, and names the schedule."""
