//! Amazon SNS: fixed fields in byte order, each as its name and its value on a line of its own.
//!
//! The certificate's address is held to Amazon's hosts elsewhere ([`crate::fetch`]). A message delivered raw carries no
//! signature and is refused, because it has no `Type`.

use serde::Deserialize;

use crate::rejection::Rejection;

/// A message. A field that occurs twice makes it unreadable.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Message {
    r#type: String,
    message: String,
    message_id: String,
    subject: Option<String>,
    #[serde(rename = "SubscribeURL")]
    subscribe_url: Option<String>,
    timestamp: String,
    token: Option<String>,
    topic_arn: String,
}

pub(super) fn string_to_sign(body: &[u8]) -> Result<Vec<u8>, Rejection> {
    let unreadable = || Rejection::AmbiguousField { field: "the message's fields".to_owned() };
    let message: Message = serde_json::from_slice(body).map_err(|_| unreadable())?;
    let mut lines: Vec<(&str, &str)> = vec![("Message", &message.message), ("MessageId", &message.message_id)];
    match message.r#type.as_str() {
        "Notification" => lines.extend(message.subject.as_deref().map(|subject| ("Subject", subject))),
        "SubscriptionConfirmation" | "UnsubscribeConfirmation" => {
            lines.push(("SubscribeURL", message.subscribe_url.as_deref().ok_or_else(unreadable)?));
        }
        _ => return Err(unreadable()),
    }
    lines.push(("Timestamp", &message.timestamp));
    if message.r#type != "Notification" {
        lines.push(("Token", message.token.as_deref().ok_or_else(unreadable)?));
    }
    lines.extend([("TopicArn", message.topic_arn.as_str()), ("Type", &message.r#type)]);
    Ok(lines.iter().map(|(name, value)| format!("{name}\n{value}\n")).collect::<String>().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::string_to_sign;

    #[test]
    fn each_type_has_its_fields() {
        let text = |body: &str| string_to_sign(body.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap());
        let body = r#"{"Type":"Notification","MessageId":"1","TopicArn":"t","Message":"a\nb","Timestamp":"T"}"#;
        assert_eq!(text(body).unwrap(), "Message\na\nb\nMessageId\n1\nTimestamp\nT\nTopicArn\nt\nType\nNotification\n");
        let with_subject = body.replace("\"Message\":", "\"Subject\":\"s\",\"Message\":");
        assert!(text(&with_subject).unwrap().contains("MessageId\n1\nSubject\ns\nTimestamp"));
        let confirmation = body
            .replace("Notification", "UnsubscribeConfirmation")
            .replace("\"Message\":", "\"Token\":\"k\",\"SubscribeURL\":\"u\",\"Message\":");
        assert_eq!(
            text(&confirmation).unwrap(),
            "Message\na\nb\nMessageId\n1\nSubscribeURL\nu\nTimestamp\nT\nToken\nk\nTopicArn\nt\nType\nUnsubscribeConfirmation\n",
            "the token is signed here too"
        );
        for bad in [
            "{}",
            "raw delivery",
            &body.replace("Notification", "Other"),
            &body.replace("\"Message\":", "\"Message\":\"x\",\"Message\":"),
        ] {
            assert!(text(bad).is_err(), "{bad}");
        }
    }
}
