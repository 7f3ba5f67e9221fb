"""What people and programs are told: tables for a terminal, JSON for scripts."""
