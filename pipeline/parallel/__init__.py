"""The processes of a job: how they meet, which share what, and what they tell each other."""
