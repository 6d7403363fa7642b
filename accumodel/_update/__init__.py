"""The sums of the gradients, and the update: every weight goes through here."""
