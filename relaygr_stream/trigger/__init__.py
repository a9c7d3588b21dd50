"""The trigger: reads request events, admits those worth a pre-inference, sends signals to the workers."""
