"""Whether and how a message is coded: pure rules, numbers in and numbers out."""
