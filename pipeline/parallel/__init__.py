"""The processes of a job: rendezvous, groups and communication."""
