"""The update's arithmetic: batches, replay, losses and advantages, and the policy that is loaded and saved."""
