//! Lets deliveries go on after an operator's order.

pub(super) use super::entity::unblock as let_go_on;
