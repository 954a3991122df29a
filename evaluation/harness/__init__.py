"""This project's generation under EleutherAI's harness (Gao et al. 2024)."""
