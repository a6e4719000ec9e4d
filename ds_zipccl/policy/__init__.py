"""The rules that decide whether and how a message is compressed. All rules are pure: numbers in and numbers out."""
