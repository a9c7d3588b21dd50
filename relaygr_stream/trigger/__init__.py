"""The trigger: reads request events, admits those worth a pre-inference, signals the workers (DESIGN §6)."""
