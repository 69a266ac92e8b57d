"""Fine-tuning of a mixture of experts, of which only the experts that tokens were routed to travel."""
